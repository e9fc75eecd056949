#pragma once
// SyncBatchNorm: batch normalisation whose statistics are those of all ranks' samples together, forward and backward.

#include <torch/nn/modules/batchnorm.h>

#include <memory>
#include <optional>

#include "shoal/group.h"

namespace shoal {

// As torch::nn::BatchNorm1d, 2d and 3d on the ranks' batches concatenated. Input [n, c], [n, c, d], [n, c, h, w] or
// [n, c, d, h, w]; float16 and bfloat16 are computed in float32. Ranks may have different numbers of samples, or none:
// such a rank calls forward with a batch of 0, and takes part in backward like the others.
//
// While training, forward is collective (one all-gather of 2 c + 1 float64), and so is backward (one all-reduce of 2 c
// float64); ranks must run their SyncBatchNorms in one order. In evaluation, and in a group of one rank, it is plain
// batch normalisation without communication. Gradients of weight and bias are those of this rank's samples, for
// DistributedDataParallel and the like to average. Running statistics come out equal on all ranks.
//
// forward throws UsageError, before any communication, for an input of another shape or dtype, and on every rank when
// all of them together have one value per channel. Backward of a backward is refused with UsageError.
class SyncBatchNormImpl : public torch::nn::NormImplBase<0, SyncBatchNormImpl, torch::nn::BatchNormOptions> {
 public:
  SyncBatchNormImpl(const torch::nn::BatchNormOptions& options, Group group);

  // Takes over a batch norm's parameters (the tensors themselves), statistics (their memory) and mode.
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

// Replaces every BatchNorm1d, 2d and 3d that stands in a Sequential, at any depth of the module or being the module
// itself, by a SyncBatchNorm with the same parameters. Returns the module, or its replacement. Not collective.
//
// A batch norm that is anything but an element of a Sequential cannot be replaced from outside: the module's author
// calls it through a member of its own type, and would go on without synchronisation. UsageError names all such;
// declare them as SyncBatchNorm. Nothing has changed then.
std::shared_ptr<torch::nn::Module> convert_sync_batch_norm(const std::shared_ptr<torch::nn::Module>& module,
                                                           const Group& group);

}  // namespace shoal
