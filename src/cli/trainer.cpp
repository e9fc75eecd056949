#include "cli/trainer.h"

#include <fmt/format.h>

#include <chrono>

#include "cli/machine.h"
#include "cli/metrics.h"
#include "cli/optimizers.h"
#include "cli/schedules.h"
#include "models/loss.h"
#include "shoal/comm/timeline.h"

namespace shoal::cli {

using Clock = std::chrono::steady_clock;

volatile std::sig_atomic_t interrupted = 0;

namespace {

double mebibytes(const std::vector<at::Tensor>& tensors) {
  double bytes = 0;
  for (const auto& tensor : tensors) bytes += static_cast<double>(tensor.nbytes());
  return bytes / (1 << 20);
}

// What the optimizer updates in a wider dtype than the model's.
std::vector<at::Tensor> main_copies(const torch::optim::Optimizer& optimizer, const models::Model& model) {
  const auto dtype = model.parameters().front().scalar_type();
  std::vector<at::Tensor> list;
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      if (parameter.scalar_type() != dtype) list.push_back(parameter);
    }
  }
  return list;
}

}  // namespace

Trainer::Trainer(const TrainOptions& options, const Group& group, std::shared_ptr<models::Model> model, Feed& feed)
    : options_(options),
      group_(group),
      model_(std::move(model)),
      feed_(feed),
      strategy_(make_strategy(options, model_, group, total_steps())) {}

int64_t Trainer::total_steps() const {
  return options_.steps ? *options_.steps : *feed_.steps_per_epoch() * *options_.epochs;
}

// One optimizer step; returns the mean loss over its micro-batches.
double Trainer::step(int64_t number, TrainResult& result) {
  const auto before = group_.statistics();
  const auto precision = options_.precision();
  auto* timeline = timeline_of(group_);
  const TimedScope whole(timeline, "step", number);
  double loss_sum = 0;
  for (int micro = 0; micro < options_.accumulate; ++micro) {
    const auto batch = feed_.next(number, micro);
    const auto loss = [&] {
      const TimedScope scope(timeline, "forward", number);
      return models::loss_of(strategy_->forward(precision.input(batch.data)), batch.target);
    }();
    const TimedScope scope(timeline, "backward", number);
    const bool last = micro + 1 == options_.accumulate;
    strategy_->backward(options_.accumulate > 1 ? loss / options_.accumulate : loss, last);
    loss_sum += loss.item<double>();
  }
  result.wait_ms.push_back(1e3 * (group_.statistics().waited_s - before.waited_s));
  const TimedScope scope(timeline, "optimizer", number);
  const auto start = Clock::now();
  strategy_->step();
  if (number == 0) result.grads_mib = mebibytes(strategy_->gradients());
  strategy_->zero_grad();
  result.update_ms.push_back(std::chrono::duration<double, std::milli>(Clock::now() - start).count());
  result.sent.push_back(group_.statistics().bytes - before.bytes);
  return loss_sum / options_.accumulate;
}

// After an interrupt. Ranks that need each other to save the model end with the same step.
bool Trainer::stops(int64_t number) const {
  if (has_whole_model()) return interrupted != 0;
  auto anywhere = at::full({1}, interrupted != 0 ? 1 : 0, at::kInt);
  group_.all_reduce(anywhere, ReduceOp::max, {number, -1, "interrupted"}).wait();
  if (anywhere.item<int>() != 0) interrupted = 1;
  return interrupted != 0;
}

TrainResult Trainer::run(const std::function<void()>& save) {
  const auto per_epoch = feed_.steps_per_epoch();
  const int64_t total = total_steps();
  const int64_t samples_per_step = options_.batch * options_.accumulate;
  auto& optimizer = strategy_->optimizer();
  const auto schedule = make_schedule(options_, optimizer, total);
  TrainResult result;
  const auto before = group_.statistics();
  const auto wire = loopback_bytes();
  Metrics metrics(group_.rank() == 0 ? options_.metrics : "");
  Progress progress(group_.rank() == 0, total, "samples");
  for (int64_t number = 0; number < total && !stops(number); ++number) {
    const int64_t epoch = per_epoch ? number / *per_epoch : 0;
    if (number == epoch * per_epoch.value_or(total)) feed_.begin_epoch(epoch);
    const auto start = Clock::now();
    result.lr.push_back(optimizer.param_groups().front().options().get_lr());
    result.loss.push_back(step(number, result));
    if (schedule) schedule->step();
    const std::chrono::duration<double> duration = Clock::now() - start;
    result.seconds += duration.count();
    result.step_ms.push_back(1e3 * duration.count());
    result.samples += samples_per_step;
    metrics.write({{"step", number},
                   {"seconds", result.seconds},
                   {"loss", result.loss.back()},
                   {"lr", result.lr.back()},
                   {"step_ms", result.step_ms.back()},
                   {"wait_ms", result.wait_ms.back()},
                   {"update_ms", result.update_ms.back()},
                   {"samples", result.samples * group_.size()}});
    progress.update(number + 1, result.samples * group_.size(), result.loss.back(), strategy_->note());
    if (options_.save_every > 0 && (number + 1) % options_.save_every == 0) {
      const auto whole = strategy_->whole_parameters();
      save();
    }
    const bool epoch_ends = per_epoch && (number + 1) % *per_epoch == 0;
    if (!options_.eval || !(epoch_ends || number + 1 == total)) continue;
    const auto whole = strategy_->whole_parameters();
    result.eval.push_back(evaluate(*model_, *feed_.test_data(), present(), options_.precision()));
    metrics.write({{"step", number},
                   {"eval_loss", result.eval.back().loss},
                   {"eval_accuracy", result.eval.back().accuracy},
                   {"eval_count", result.eval.back().count}});
    progress.clear();
    if (group_.rank() == 0) {
      fmt::print("epoch {}: test loss {:.4f}, accuracy {:.2f} %\n", epoch + 1, result.eval.back().loss,
                 100 * result.eval.back().accuracy);
      std::fflush(stdout);
    }
  }
  result.params_mib = mebibytes(strategy_->parameters());
  for (const auto* local : strategy_->local_optimizers()) {
    result.state_mib += mebibytes(state_tensors(*local)) + mebibytes(main_copies(*local, *model_));
  }
  result.figures = strategy_->figures();
  const auto after = group_.statistics();
  result.communication = {after.calls - before.calls, after.bytes - before.bytes, after.waited_s - before.waited_s};
  result.wire_bytes = loopback_bytes() - wire;
  return result;
}

}  // namespace shoal::cli
