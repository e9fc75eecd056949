#pragma once
// SyncBatchNorm: batch normalisation with statistics over the samples of all ranks, in forward and backward.

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <optional>
#include <type_traits>

#include "shoal/error.h"
#include "shoal/group.h"

namespace shoal {

// Batch normalisation of the concatenated batches of all ranks, after torch.nn.SyncBatchNorm. Input [n, c], [n, c, d],
// [n, c, h, w] or [n, c, d, h, w]; float16 and bfloat16 are computed in float32. Ranks may have different numbers of
// samples, or none: a rank without samples calls forward with a batch of 0 and takes part in backward.
//
// In training mode forward is collective (one all-gather of 2 c + 1 float64), and so is backward (one all-reduce of 2 c
// float64); all ranks must run their SyncBatchNorms in the same order. In evaluation mode, and in a group of one rank,
// it is plain batch normalisation without communication. Gradients of weight and bias are those of this rank's samples,
// to be averaged by DistributedDataParallel or a similar wrapper. Running statistics are equal on all ranks; batches of
// training leave them alone while options.track_running_stats() is false, as in Python.
//
// forward throws UsageError before any communication for an input of another shape or dtype, and on every rank if all
// ranks together have only one value per channel. Double backward throws UsageError.
class SyncBatchNormImpl : public torch::nn::NormImplBase<0, SyncBatchNormImpl, torch::nn::BatchNormOptions> {
 public:
  SyncBatchNormImpl(const torch::nn::BatchNormOptions& options, Group group);

  // Takes parameters (the same tensors), statistics (the same memory) and mode from a batch norm.
  template <size_t D, class Norm>
  SyncBatchNormImpl(const torch::nn::BatchNormImplBase<D, Norm>& norm, Group group)
      : SyncBatchNormImpl(norm.options, std::move(group)) {
    adopt(norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.num_batches_tracked);
    train(norm.is_training());
  }

  at::Tensor forward(const at::Tensor& input);

  void pretty_print(std::ostream& stream) const override;

 protected:
  void _check_input_dim(const at::Tensor& input) override;

 private:
  void adopt(const at::Tensor& new_weight, const at::Tensor& new_bias, const at::Tensor& mean, const at::Tensor& var,
             const at::Tensor& batches);
  double count_batch();

  Group group_;
};
TORCH_MODULE(SyncBatchNorm);

namespace detail {

// An object, because it returns what it is given, and std::function and std::bind take no overloaded function.
struct ConvertSyncBatchNorm {
  std::shared_ptr<torch::nn::Module> operator()(const std::shared_ptr<torch::nn::Module>& module,
                                                const Group& group) const;
  template <class Holder>
  requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, Holder> Holder operator()(const Holder& module,
                                                                                             const Group& group) const {
    const std::shared_ptr<torch::nn::Module> held = module.is_empty() ? nullptr : module.ptr();
    if ((*this)(held, group) == held) return module;
    throw UsageError(
        "convert_sync_batch_norm: the module itself is a batch norm, and its holder can hold no other type; declare it "
        "as shoal::SyncBatchNorm");
  }
};

}  // namespace detail

// Replaces every BatchNorm1d, 2d and 3d that is an element of a Sequential, at any depth, or the module itself, by a
// SyncBatchNorm with the same parameters. Returns the module, or its replacement. Not collective.
//
//   std::shared_ptr<torch::nn::Module> convert_sync_batch_norm(const std::shared_ptr<torch::nn::Module>& module,
//                                                              const Group& group);
//
// A module's holder, such as a Sequential, is taken and returned likewise; UsageError if its module itself is a batch
// norm.
//
// Other batch norms cannot be replaced from outside, because the module calls them through members of their own type
// and would continue without synchronisation. Then it throws UsageError with their names and changes nothing: declare
// them as SyncBatchNorm.
inline constexpr detail::ConvertSyncBatchNorm convert_sync_batch_norm{};

}  // namespace shoal
