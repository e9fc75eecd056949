#include "cli/train/evaluate.h"

#include <torch/utils.h>

#include "data/sharded_sampler.h"
#include "models/loss.h"

namespace shoal::cli {

Evaluation evaluate(models::Model& model, data::Dataset& samples, const Group& group, const Precision& precision) {
  constexpr size_t batch_size = 256;
  const torch::NoGradGuard no_grad;
  const Precision::Scope scope(precision, at::kCPU);
  const bool training = model.is_training();
  model.eval();
  data::ShardedSampler sampler(*samples.size(), {.world = static_cast<size_t>(group.size()),
                                                 .rank = static_cast<size_t>(group.rank()),
                                                 .order = data::Order::sequential,
                                                 .remainder = data::Remainder::keep});
  double loss = 0;
  int64_t right = 0;
  int64_t count = 0;
  while (const auto indices = sampler.next(batch_size)) {
    const auto batch = samples.get_batch(*indices);
    const auto logits = model.forward(precision.input(batch.data));
    loss += models::loss_of(logits, batch.target).item<double>() * static_cast<double>(batch.target.numel());
    right += logits.argmax(-1).eq(batch.target).sum().item<int64_t>();
    count += batch.target.numel();
  }
  model.train(training);
  auto sums = at::tensor({loss, static_cast<double>(right), static_cast<double>(count)}, at::kDouble);
  group.all_reduce(sums, ReduceOp::sum, {-1, -1, "evaluation"}).wait();
  const auto* sum = sums.data_ptr<double>();
  return {sum[0] / sum[2], sum[1] / sum[2], static_cast<int64_t>(sum[2])};
}

}  // namespace shoal::cli
