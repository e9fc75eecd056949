#include "cli/train/evaluate.h"

#include <torch/utils.h>

#include "models/loss.h"
#include "shoal/data.h"

namespace shoal::cli {

Evaluation evaluate(models::Model& model, data::Dataset& samples, const Group& group, const Precision& precision) {
  constexpr size_t batch_size = 256;
  const torch::NoGradGuard no_grad;
  const auto device = model.parameters().front().device();
  const Precision::Scope scope(precision, device.type());
  const bool training = model.is_training();
  model.eval();
  DistributedSampler sampler(*samples.size(), group, {.shuffle = false, .pad = false});
  double loss = 0;
  int64_t right = 0;
  int64_t count = 0;
  while (const auto indices = sampler.next(batch_size)) {
    const auto batch = samples.get_batch(*indices);
    const auto target = batch.target.to(device);
    const auto logits = model.forward(precision.input(batch.data.to(device)));
    loss += models::loss_of(logits, target).item<double>() * static_cast<double>(target.numel());
    right += logits.argmax(-1).eq(target).sum().item<int64_t>();
    count += batch.target.numel();
  }
  model.train(training);
  const auto sum = group.all_reduce(std::vector<double>{loss, static_cast<double>(right), static_cast<double>(count)},
                                    ReduceOp::sum, {-1, -1, "evaluation"});
  return {sum[0] / sum[2], sum[1] / sum[2], static_cast<int64_t>(sum[2])};
}

}  // namespace shoal::cli
