#include "shoal/sync_batch_norm.h"

#include "wrappers/bind.h"

namespace shoal::python {
namespace {

// Tensors of a Python module, as libtorch's module has them.
struct Norm {
  at::Tensor weight, bias, running_mean, running_var, num_batches_tracked;
};

at::Tensor forward(const at::Tensor& input, const Norm& tensors, double eps, std::optional<double> momentum,
                   bool training, const Group& group) {
  torch::nn::BatchNorm1dImpl norm(torch::nn::BatchNormOptions(input.dim() > 1 ? input.size(1) : 0)
                                      .eps(eps)
                                      .momentum(momentum)
                                      .affine(tensors.weight.defined())
                                      .track_running_stats(tensors.running_mean.defined()));
  norm.weight = tensors.weight;
  norm.bias = tensors.bias;
  norm.running_mean = tensors.running_mean;
  norm.running_var = tensors.running_var;
  norm.num_batches_tracked = tensors.num_batches_tracked;
  norm.train(training);
  return SyncBatchNormImpl(norm, group).forward(input);
}

}  // namespace

void bind_sync_batch_norm(py::module_& module) {
  module.def("sync_batch_norm", [](const at::Tensor& input, const std::optional<at::Tensor>& weight,
                                   const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& mean,
                                   const std::optional<at::Tensor>& var, const std::optional<at::Tensor>& batches,
                                   double eps, std::optional<double> momentum, bool training, const Group& group) {
    const auto or_none = [](const std::optional<at::Tensor>& tensor) { return tensor.value_or(at::Tensor()); };
    const Norm tensors{or_none(weight), or_none(bias), or_none(mean), or_none(var), or_none(batches)};
    return unlocked([&] { return forward(input, tensors, eps, momentum, training, group); });
  });
}

}  // namespace shoal::python
