// Step of the decentralised strategy: gradients arrive; buckets are mixed, updated and shown.

#include <ATen/record_function.h>
#include <fmt/format.h>
#include <torch/utils.h>

#include <algorithm>
#include <cmath>

#include "engine/gradients/gradient_norm.h"
#include "shoal/error.h"
#include "shoal/telemetry.h"
#include "strategy/decentralized/state.h"

namespace shoal {

using State = DecentralizedDataParallelCore::State;
using Phase = BackwardTracker::Phase;

void State::require_present(const char* what) const {
  if (!left) return;
  throw UsageError(fmt::format(
      "DecentralizedDataParallel: this rank has called leave(); {} is for ranks that are still training", what));
}

void State::begin_backward() {
  require_present("backward");
  separate();
  spent.clear();
  const bool in_backward = BackwardTracker::in_backward();  // false for a rank without samples
  if (in_backward && !weighing) {
    if (weights == Weights::given) forget_dropped_weights();
    const bool by_other = others_weight.take([this](double of_loss) { weight += of_loss; });
    if (weights == (by_other ? Weights::none : Weights::given)) {
      throw UsageError(
          "a backward with a weight and one without in the same step: use either one for all micro-batches");
    }
    weights = by_other ? Weights::given : Weights::none;
  }
  tracker.enter(no_sync_depth > 0 ? Phase::local : Phase::running);
  if (tracker.phase() == Phase::local) return;
  if (in_backward) clock.mark(StepClock::backward_begins, step);
  mixing.begin_step();
  if (whole) whole->give_options(buckets);
  used.assign(gradients.size(), false);
  progress.assign(buckets.size(), Progress::waiting);
  missing.assign(buckets.size(), 0);
  for (size_t i = 0; i < gradients.size() && !buckets.empty(); ++i) ++missing[bucket_of[i]];
}

void State::step_without_update() {
  tracker.begin();
  drop_gradients();
  forget_weights();
  tracker.end();
}

void State::backward(const at::Tensor& loss_sum, double of_loss) {
  if (!std::isfinite(of_loss) || of_loss < 0) {
    throw UsageError(fmt::format("backward: weight {} must be finite and not negative", of_loss));
  }
  const bool has_graph = loss_sum.defined() && loss_sum.requires_grad();
  if (!has_graph && of_loss > 0) throw UsageError("backward: the loss does not depend on any trainable parameter");
  forget_dropped_weights();
  if (weights == Weights::none) {
    throw UsageError("a backward with a weight and one without in the same step: use either one for all micro-batches");
  }
  require_present("backward");
  weights = Weights::given;
  weight += of_loss;
  if (!has_graph) {
    if (no_sync_depth > 0) return;
    tracker.begin();  // a step of the micro-batches before
    tracker.end();
    return;
  }
  weighing = true;
  try {
    const BackwardWeightScope for_other_wrappers(of_loss);
    loss_sum.backward();
  } catch (...) {
    weighing = false;
    if (tracker.phase() == Phase::idle) weight -= of_loss;  // no backward had begun
    throw;
  }
  weighing = false;
}

void State::arrived(size_t gradient) {
  if (tracker.phase() == Phase::local) micro_batches.add(gradient);
  if (tracker.phase() != Phase::running) return;
  const TimedScope scope(timeline_of(group), "hook", step);
  tracker.count(gradient);
  if (buckets.empty()) return;
  const auto arrivals = tracker.arrivals()[gradient];
  const auto bucket = bucket_of[gradient];
  if (progress[bucket] != Progress::waiting) {
    expected[gradient] = std::max(expected[gradient], arrivals);
    throw UsageError(fmt::format(
        "the gradient of {} was computed {} times in this backward, more often than before, and after it had been used "
        "for an update; the step is lost on this rank, and later steps wait for the last gradient",
        gradients[gradient].name, arrivals));
  }
  // Only the end of backward shows that a parameter without any gradient so far gets none.
  if (arrivals != expected[gradient] || --missing[bucket] > 0 || updates_at_end()) return;
  finish(bucket, /*update=*/true);
}

void State::end_backward(EndStage stage) {
  if (stage != EndStage::send) return;
  const TimedScope scope(timeline_of(group), "hook", step);
  clock.mark(StepClock::backward_ends, step);
  if (!weights_told) {
    tell_weights();
    weights_told = true;
  }
  if (buckets.empty()) build_buckets(tracker.order());
  const bool finite = !updates_at_end() || unscale_and_clip();
  weigh(finite);
  for (size_t i = 0; i < buckets.size(); ++i) finish(i, finite);
  if (scale) scale->step(mixing.version() + 1, mixing.known());
  clock.mark(StepClock::all_back, step);
  clock.end_step(/*finished=*/true);
  end_step();
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (used[i]) spent.leave(i);
  }
  tracker.enter(Phase::idle);
  require_that_all_go_on(mixing.version());  // throws if this step was made without a rank that has stopped
}

void State::end_step() {
  for (size_t i = 0; i < gradients.size(); ++i) expected[i] = std::max(expected[i], tracker.arrivals()[i]);
  mixing.end_step();
  if (whole) whole->show_rates(buckets);
  ++step;
  forget_weights();
}

void State::forget_weights() {
  weight = 0;
  weights = Weights::unknown;
  divisor.reset();
  micro_batches.forget();
}

void State::forget_dropped_weights() {
  if (tracker.phase() != Phase::running && micro_batches.dropped()) forget_weights();
}

void State::weigh(bool finite) {
  if (divisor) return;
  // A rank without a batch has weight 0 in a training with weights. A step of plain backwards tells none.
  const bool weighted = weights == Weights::given || (weights == Weights::unknown && mixing.known().weighs());
  divisor = weighted ? mixing.mean_weight(weight) : 1;
  mixing.tell(weighted ? std::optional(weight) : std::nullopt, !finite);
}

void State::give_up_step() {
  const auto lock = tracker.lock();
  const torch::NoGradGuard no_grad;
  if (tracker.phase() == Phase::running && !buckets.empty() && weights_told) {
    if (!divisor) mixing.tell(std::nullopt, /*overflowed=*/false);
    divisor = 1;
    for (size_t i = 0; i < buckets.size(); ++i) finish(i, /*update=*/false);
    clock.end_step(/*finished=*/false);
    if (scale) scale->step(mixing.version() + 1, mixing.known());  // in the form in which it counts for the other ranks
    end_step();
  }
  tracker.enter(Phase::idle);
  forget_weights();
  drop_gradients();
}

void State::finish(size_t index, bool with_update) {
  auto& bucket = buckets[index];
  if (progress[index] == Progress::waiting) {
    const bool first =
        std::none_of(progress.begin(), progress.end(), [](Progress p) { return p != Progress::waiting; });
    if (first) clock.mark(StepClock::first_leaves, step);
    // From here until the bucket is shown, an error must not cause this to run again.
    progress[index] = Progress::mixed;
    bucket.adopt();
    mix(index);
    weigh(/*finite=*/true);
    if (with_update && (weights != Weights::given || weight > 0)) update(bucket);
    if (bucket.schedule) bucket.schedule->step();
    for (const auto member : members[index]) {
      auto& grad = gradients[member].parameter.mutable_grad();
      used[member] = grad.defined();
      grad.reset();
    }
  }
  if (progress[index] == Progress::shown) return;
  mixing.show(index, [&](const at::Tensor& flat, double scale) { bucket.write_to(flat, scale); });
  progress[index] = Progress::shown;
}

void State::mix(size_t index) {
  auto& bucket = buckets[index];
  if (!options.pre_average_hook && bucket.flat().defined() && mixing.mix_into(index, bucket.flat())) return;
  auto [own, others] = mixing.gather(index);
  if (!others.defined()) return;
  others = others.to(bucket.device());
  if (options.pre_average_hook) {
    options.pre_average_hook({.optimizer = *bucket.optimizer,
                              .parameters = bucket.members(),
                              .received = bucket.views_of(others),
                              .own_weight = own,
                              .round = mixing.round(),
                              .rank = mixing.number()});
  }
  bucket.mix(own, others);
}

void State::update(GossipBucket& bucket) {
  RECORD_USER_SCOPE("shoal::update");
  const TimedScope scope(timeline_of(group), "update", step);
  if (weights == Weights::given && !updates_at_end()) {
    for (auto& gradient : gradients_of(bucket)) gradient.div_(*divisor);
  }
  if (options.clip_grad > 0 && options.clip == ClipScope::bucket) {
    const auto own = gradients_of(bucket);
    clip_to_norm(own, local_norm(own, 2), options.clip_grad);
  }
  bucket.optimizer->step();
}

std::vector<at::Tensor> State::gradients_of(const GossipBucket& bucket) const {
  std::vector<at::Tensor> list;
  for (const auto& member : bucket.members()) {
    if (member.parameter.grad().defined()) list.push_back(member.parameter.grad());
  }
  return list;
}

std::vector<at::Tensor> State::all_gradients() const {
  std::vector<at::Tensor> list;
  for (const auto& gradient : gradients) {
    if (gradient.parameter.grad().defined()) list.push_back(gradient.parameter.grad());
  }
  return list;
}

bool State::unscale_and_clip() {
  const auto list = all_gradients();
  if (scaler && scaler->unscale(list)) return false;
  weigh(/*finite=*/true);
  if (weights == Weights::given && weight > 0) {
    for (const auto& gradient : list) at::Tensor(gradient).div_(*divisor);
  }
  if (options.clip_grad > 0 && options.clip == ClipScope::all_gradients) {
    norm = local_norm(list, 2);
    clip_to_norm(list, norm, options.clip_grad);
  }
  return true;
}

void State::drop_gradients() {
  for (const auto& gradient : gradients) at::Tensor(gradient.parameter).mutable_grad().reset();
}

}  // namespace shoal
