// Steps that a caller begins or abandons (a weighted backward, a reduction without a backward), and the end of the
// wrapper.

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/utils.h>

#include <cmath>

#include "comm/group/group_state.h"
#include "engine/reducer/reducer.h"
#include "shoal/error.h"

namespace shoal {

void Reducer::resume_from(const std::optional<BucketOrder::Learnt>& learnt) {
  if (order_.resume_from(learnt)) build_as_registered();
}

void Reducer::check_last_step() {
  if (last_.unused_names.empty()) return;
  const auto names = std::exchange(last_.unused_names, {});
  throw UsageError(fmt::format(
      "no rank computed a gradient for {} in the last step. If one forward has several backwards (of different "
      "outputs), call all but the last under no_sync(), or set find_unused_parameters; else use these parameters in "
      "the loss, freeze them (requires_grad_(false)) or ignore them, or set find_unused_parameters. In C++, a "
      "parameter whose member was assigned (b->weight = a->weight) stays registered, and is not used",
      fmt::join(names, ", ")));
}

void Reducer::backward(const at::Tensor& loss_sum, double weight) {
  if (!std::isfinite(weight) || weight < 0) {
    throw UsageError(fmt::format("backward: weight {} must be finite and not negative", weight));
  }
  const bool has_graph = loss_sum.defined() && loss_sum.requires_grad();
  if (!has_graph && weight > 0) throw UsageError("backward: the loss does not depend on any trainable parameter");
  // In a node of an outer backward, which has run a micro-batch before.
  const bool micro_batch_is_over = BackwardTracker::in_backward() && tracker_.phase() == BackwardTracker::Phase::local;
  if (micro_batch_is_over && callbacks.synchronises()) tracker_.end();
  if (!running()) adopt_changes();
  const auto before = accumulated_.weight();
  accumulated_.add_weight(weight);
  weighing_ = Weighing::under_way;
  try {
    if (has_graph) {
      const BackwardWeightScope for_other_wrappers(weight);
      loss_sum.backward();
    } else if (callbacks.synchronises()) {
      reduce_now();
    }
  } catch (...) {
    end_weighted_backward();
    callbacks.synchronises() ? mark_failed() : accumulated_.set_weight(before);
    throw;
  }
  end_weighted_backward();
}

void Reducer::end_weighted_backward() {
  const auto weighing = std::exchange(weighing_, Weighing::none);
  if (weighing == Weighing::spent) accumulated_.set_weight(std::nullopt);
}

void Reducer::reduce_now() {
  begin_now();
  end_now();
}

void Reducer::begin_now() {
  const auto lock = tracker_.lock();
  const torch::NoGradGuard no_grad;
  tracker_.begin();
  if (running()) mark_rest_ready();
}

void Reducer::end_now() {
  tracker_.end();
}

void Reducer::require_absence() const {
  if (join_state_ && !join_state_->here) return;
  throw UsageError(join_state_
                       ? "shadow: this rank has a batch in this step of the Join scope; call forward and backward"
                       : "shadow: called outside a Join scope, for whose steps without a batch it is; call "
                         "forward and backward");
}

void Reducer::set_join_state(const std::optional<JoinState>& join_state) {
  join_state_ = join_state;
  if (join_state && join_state->here) attended_step_ = steps_;
}

void Reducer::settle_failed_backward() {
  if (BackwardTracker::in_backward()) return;
  end_failed_steps();
  if (has_thrown() || running()) abandon();
}

void Reducer::settle() {
  if (!BackwardTracker::in_backward()) end_failed_steps();
  if (broken() && (entry_.failed || !tracker_.under_way())) abandon();
}

void Reducer::abandon() {
  if (!broken()) {
    const auto lock = tracker_.lock();
    tracker_.enter(BackwardTracker::Phase::idle);
    accumulated_.forget();
    accumulated_.sums().forget_held();
    entry_.forwards.clear();
    return;
  }
  if (callbacks.take_turns) {
    send_rest();
    end();
  } else {
    note_failed(*this);
    end_failed_step(*this);
  }
}

void Reducer::send_rest() {
  const auto lock = tracker_.lock();
  const torch::NoGradGuard no_grad;
  if (running() && step_->weight) return;  // it has not failed, but another one in the same backward
  entry_.failed = true;
  if (running()) step_->issues_last.reset();
  note(group_, fmt::format("gave up step {}", steps_));
  try {
    callbacks.before_writing();
    if (!running()) {
      adopt_changes();
      begin_step(Step::From::no_batch);
    } else if (step_->given_up) {
      adopt_changes();
    }
    const bool keeps_grad = reduction_->plan().everywhere() && !options_.consumer;
    for (auto& schedule = step_->schedule; schedule.next() < buckets_.size(); schedule.pass_next()) {
      const auto index = schedule.next();
      if (buckets_.all_frozen(index)) continue;
      for (const auto member : buckets_[index].members()) accumulated_.sums().set_aside(member);
      if (!buckets_[index].sparse()) {
        if (!keeps_grad) buckets_.drop_gradients(index);  // of local backwards: the peers' sums will take their place
        buckets_.acquire_bucket(index);
        buckets_[index].flat().zero_();
      }
      issue(index);
    }
  } catch (const CommError&) {  // there is nobody left to tell; the next call says so
    if (running()) step_->weight = std::nan("");
  } catch (...) {
    close_step();
    throw;
  }
}

void Reducer::end() {
  const auto lock = tracker_.lock();
  const torch::NoGradGuard no_grad;
  bool finished = false;
  try {
    if (running() && !step_->weight) {
      if (step_->early) release_finished(/*all=*/true);
      callbacks.before_waiting();
      step_->weight = wait_for_buckets();
      finished = !std::isnan(*step_->weight);
      if (!finished) who_failed();
    }
  } catch (const CommError&) {  // NOLINT(bugprone-empty-catch): there is nobody left to tell; the next call says so
  } catch (...) {
    last_.missed = last_.missed || (running() && step_->interrupted);
    close_step();
    throw;
  }
  // All had been sent before. If no backward has failed, a hook has asked for it too late: all ranks use the sums.
  if (finished && step_->behind) refuse_step_of_two();
  if (finished && !step_->given_up) return deliver_step();
  last_.missed = last_.missed || (finished && step_->interrupted);
  close_abandoned_step();
}

void Reducer::reduce_pending() {
  const auto lock = tracker_.lock();
  const torch::NoGradGuard no_grad;
  if (running()) throw UsageError("reduce: called within a backward; call it between backward and step()");
  callbacks.before_writing();
  adopt_changes();
  accumulated_.note_set();
  begin_step(Step::From::caller);
  mark_rest_ready();
  tracker_.end();
}

at::Tensor Reducer::local_gradient(size_t gradient) {
  const auto lock = tracker_.lock();
  const torch::NoGradGuard no_grad;
  callbacks.before_writing();
  adopt_changes();
  return accumulated_.local(gradient);
}

AccumulatedGradients::Left Reducer::left() {
  const auto lock = tracker_.lock();
  const torch::NoGradGuard no_grad;
  adopt_changes();
  return accumulated_.left();
}

void Reducer::resume(const AccumulatedGradients::Left& left) {
  const torch::NoGradGuard no_grad;
  accumulated_.resume(left, [this](const Bucket& bucket) {
    return reduction_->plan().keeps_whole(bucket, reduction_->plan().place(group_.rank()));
  });
}

std::vector<size_t> Reducer::unused() const {
  std::vector<size_t> list;
  for (size_t i = 0; steps_ > 0 && i < gradients_.size(); ++i) {
    if (!last_.used_anywhere[i]) list.push_back(i);
  }
  return list;
}

void Reducer::detach() {
  tracker_.detach();
  callbacks.synchronises = [] { return true; };
  callbacks.holds_back = [] { return false; };
  callbacks.before_writing = [] {};
  callbacks.before_waiting = [] {};
  callbacks.after_sum = {};
}

void Reducer::require_seen_gradients() const {
  if (tracker_.attached()) return;
  for (size_t i = 0; i < gradients_.size(); ++i) {
    if (!gradients_[i].parameter.grad().defined() || accumulated_.sums().stands_in(i)) continue;
    throw UsageError(
        fmt::format("parameter {} has a gradient that ranks have not reduced: the wrapper was destroyed before the "
                    "backward; keep the wrapper as long as its optimizer trains",
                    gradients_[i].name));
  }
}

}  // namespace shoal
