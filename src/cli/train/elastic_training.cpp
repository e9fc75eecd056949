// Training of `shoal train --elastic`, which goes on without ranks that have ended, and which ranks may join.

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "cli/strategies/schedules.h"
#include "cli/train/loop.h"
#include "models/loss.h"
#include "planning/measured_step.h"
#include "shoal/error.h"
#include "shoal/telemetry.h"

namespace shoal::cli {

void Trainer::make_elastic() {
  if (!options_.elastic) return;
  ElasticOptions how{.min_ranks = *options_.elastic,
                     .straggler_seconds = options_.straggler_seconds.value_or(0),
                     .tensors = {position_},
                     .on_change = [this](const ElasticChange& change) { follow(change); },
                     .checkpoints = options_.save};
  if (options_.keep_global_batch) {
    how.batch_slices = batch_slices();
    how.keep_global_batch = global_batch();
    if (!world_.joining() && how.keep_global_batch % how.batch_slices != 0) {  // a newcomer gets the job's
      throw UsageError(fmt::format(
          "--keep-global-batch: {} samples of a step cannot be divided among the {} ranks of --elastic: give "
          "another --batch or --accumulate",
          how.keep_global_batch, how.batch_slices));
    }
  }
  how.silent_host_seconds = options_.silent_host_seconds.value_or(how.silent_host_seconds);
  auto* sampler = feed_.sampler();
  elastic_ = sampler != nullptr ? std::make_unique<Elastic>(world_, *strategy_, *sampler, how)
                                : std::make_unique<Elastic>(world_, *strategy_, how);
}

// One for each micro-batch of the ranks at the start, or more, so that as many ranks as may come have one.
int64_t Trainer::batch_slices() const {
  return std::max(int64_t{options_.accumulate} * started_, int64_t{options_.elastic_most});
}

void Trainer::keep_batch() {
  if (options_.keep_global_batch) feed_.keep_batch(global_batch(), elastic_->batch_size());
}

// Called in the recovery, when the failed work has been left and the world is new.
void Trainer::follow(const ElasticChange& change) {
  enter_world();
  changes_.push_back(change);
}

void Trainer::enter_world() {
  group_ = world_.group();
  feed_.follow(group_.rank());
  meeting_.emplace(*strategy_, group_);
  tolerate([this] { checkpoints_.wait(); });  // a save in the background ends with its group
  take_state();
}

// Steps are counted as the present ranks would have counted them from the start, as for a checkpoint that they resume
// from.
void Trainer::divide_anew(Loop& loop) {
  const auto per_epoch = feed_.steps_per_epoch();
  if (!per_epoch) return;
  const auto epoch = loop.number / loop.per_epoch;
  const bool inside = loop.number % loop.per_epoch != 0;
  const auto left = inside ? feed_.steps_left() : 0;
  loop.number = inside ? (epoch + 1) * *per_epoch - left : epoch * *per_epoch;
  if (inside && left == 0) loop.stage = stage_after(loop);
  loop.per_epoch = *per_epoch;
  loop.divided_anew = inside && left > 0;
}

void Trainer::join(Loop& loop, TrainResult& result) {
  const auto next = position_.accessor<int64_t, 1>();
  loop.number = next[0];
  loop.per_epoch = next[1];
  if (schedule_) {
    // It is as long as the job's, whose rates the optimizer has.
    schedule_steps_ = next[2];
    auto& groups = strategy_->optimizer().param_groups();
    std::vector<double> present;
    for (size_t i = 0; i < groups.size(); ++i) {
      present.push_back(groups[i].options().get_lr());
      groups[i].options().set_lr(base_rates_[i]);
    }
    schedule_ = make_schedule(options_, strategy_->optimizer(), schedule_steps_);
    for (size_t i = 0; i < groups.size(); ++i) groups[i].options().set_lr(present[i]);
  }
  started_ = static_cast<int>(next[3]);
  result.missed = elastic_->steps();
  enter_world();
  elastic_->begin_loop();
  loop.has_come = true;
}

void Trainer::tell_changes(Loop& loop, TrainResult& result) {
  const bool comes = std::exchange(loop.has_come, false);
  if (changes_.empty() && !comes) return;
  keep_batch();
  divide_anew(loop);
  if (comes) loop.first = loop.number;
  loop.log.report(leads());
  loop.log.clear_progress();
  for (auto& change : changes_) {
    change.step = loop.number;
    result.changes.push_back(nlohmann::ordered_json::parse(change.metrics_line()));
    loop.log.change("shoal: " + change.text(), result.changes.back());
  }
  changes_.clear();
}

// A collective may be complete on some ranks when it fails on others, so that these do what those have done already.
// Steps are the same on all (Elastic), so the first of the stages is where all go on; to repeat one does no harm.
bool Trainer::agree_on_stage(Loop& loop) {
  bool stops = false;
  elastic_->together([&] {
    const auto standing = at::tensor(
        {-static_cast<int64_t>(loop.stage), static_cast<int64_t>(interrupted), static_cast<int64_t>(unread_)},
        at::kLong);
    group_.all_reduce(standing, ReduceOp::max, {loop.number, -1, "where ranks stand"}).wait();
    loop.stage = static_cast<Stage>(-standing[0].item<int64_t>());
    unread_ = standing[2].item<int64_t>() != 0;
    stops = unread_ || standing[1].item<int64_t>() != 0;
  });
  return stops;
}

// Runs the work once. False: ranks have ended in it.
bool Trainer::attempt(const std::function<void()>& work) {
  bool begun = false;
  return elastic_->together([&] {
    if (std::exchange(begun, true)) return false;
    work();
    return true;
  });
}

Trainer::Stage Trainer::stage_after(const Loop& loop) const {
  if (evaluates(loop.number)) return Stage::evaluation;
  return checkpoints_.is_due(loop.number) && loop.number < total_steps() ? Stage::save : Stage::step;
}

void Trainer::run_stage(Loop& loop, TrainResult& result) {
  if (loop.stage == Stage::step) {
    if (train_step(loop, result)) loop.stage = stage_after(loop);
    return;
  }
  if (loop.stage == Stage::evaluation) {
    Evaluation evaluation;
    if (!attempt([&] { bytes_.between(group_, [&] { evaluation = evaluated(group_, result); }); })) return;
    if (std::exchange(loop.evaluated, elastic_->steps()) == elastic_->steps()) result.eval.pop_back();  // repeated
    tell_evaluation(loop, evaluation, result);
    const bool saves = checkpoints_.is_due(loop.number) && loop.number < total_steps();
    loop.stage = saves ? Stage::save : Stage::step;
    return;
  }
  loop.log.clear_progress();
  bool done = true;
  tolerate([&] {  // the last one may have failed
    done = attempt([&] { checkpoints_.wait(); });
  });
  if (!done) return;
  tolerate(
      [&] { done = attempt([&] { bytes_.between(group_, [&] { checkpoints_.save_in_background(loop.number); }); }); });
  if (done) loop.stage = Stage::step;
}

void Trainer::train_elastic(Loop& loop, TrainResult& result) {
  while (!result.stopped) {
    const bool stops = agree_on_stage(loop);
    tell_changes(loop, result);
    if (loop.stage == Stage::step && loop.number >= total_steps()) return;
    result.stopped = stops && loop.stage == Stage::step;
    result.unread = result.stopped && unread_;
    if (!result.stopped) run_stage(loop, result);
  }
}

void Trainer::begin_epoch(Loop& loop) {
  if (loop.per_epoch == 0) return;
  const bool anew = std::exchange(loop.divided_anew, false);
  const auto done = loop.number % loop.per_epoch;
  const bool begins = done == 0 || (loop.number == loop.first && elastic_->steps() == 0);
  if (!begins && !anew) return;
  if (!anew) feed_.prepare_epoch(loop.number / loop.per_epoch, done);
  elastic_->in_epoch();
  keep_batch();
  feed_.open();
}

std::optional<double> Trainer::elastic_step(int64_t number, TrainResult& result) {
  TrainedStep step;
  GroupStatistics sent;  // until the end of the update, which an exchange may follow
  const auto update = [&] {
    measured_update(*strategy_, number, /*gradients=*/result.loss.empty(), step.measured);
    sent = strategy_->statistics();
  };
  const TimedScope whole(timeline_of(group_), "step", number);
  const bool complete =
      options_.keep_global_batch ? step_of_slices(number, step, update) : step_of_micros(number, step, update);
  if (!complete) return std::nullopt;
  step.measured.add(strategy_->statistics() - sent);
  result.add(step);
  return step.measured.loss;
}

// The mean over the ranks, by their samples. Within the step, because the loss of a rank that ends later is lost with
// it.
void Trainer::average_loss(int64_t number, TrainedStep& step) const {
  const auto own = static_cast<double>(step.samples);
  const auto sums = group_.all_reduce({step.measured.loss * own, own}, ReduceOp::sum, {number, -1, "loss"});
  step.measured.loss = sums[0] / sums[1];
  step.all_samples = static_cast<int64_t>(sums[1]);
}

bool Trainer::step_of_micros(int64_t number, TrainedStep& step, const std::function<void()>& update) {
  std::vector<data::Batch> batches;
  // An epoch may have fewer batches than a step has micro-batches, on all ranks.
  for (int micro = 0; micro < options_.accumulate && (micro == 0 || feed_.has_next()); ++micro) {
    batches.push_back(feed_.next(number, micro));
    step.samples += batches.back().data.size(0);
  }
  const auto compute = [&] {
    step.measured = measured_gradients(*strategy_, number, static_cast<int>(batches.size()), [&](int micro) {
      const auto& batch = batches[static_cast<size_t>(micro)];
      return elastic_loss(number, batch.data, batch.target);
    });
    average_loss(number, step);
  };
  return elastic_->step(step.samples, compute, update);
}

bool Trainer::step_of_slices(int64_t number, TrainedStep& step, const std::function<void()>& update) {
  const auto batch = feed_.next(number, 0);
  step.samples = batch.data.size(0);
  auto& measured = step.measured;
  const auto compute = [&](int64_t begin, int64_t end) {
    if (begin == 0) measured = {};
    const auto slice = measured_gradients(*strategy_, number, 1, [&](int) {
      return elastic_loss(number, batch.data.slice(0, begin, end), batch.target.slice(0, begin, end));
    });
    measured.loss += slice.loss * static_cast<double>(end - begin) / static_cast<double>(step.samples);
    measured.wait_ms += slice.wait_ms;
    measured.calls += slice.calls;
    measured.bytes += slice.bytes;
  };
  return elastic_->step(
      step.samples, compute, [&] { average_loss(number, step); }, update);
}

at::Tensor Trainer::elastic_loss(int64_t number, const at::Tensor& data, const at::Tensor& target) {
  const TimedScope scope(timeline_of(group_), "forward", number);
  return models::loss_of(strategy_.forward(options_.precision().input(data)), target);
}

}  // namespace shoal::cli
