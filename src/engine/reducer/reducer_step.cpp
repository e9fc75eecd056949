// The second half of a step: results come back, or the step is abandoned.

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/utils.h>

#include <algorithm>
#include <cmath>

#include "comm/group/group_state.h"
#include "engine/gradients/local_gradients.h"
#include "engine/reducer/reducer.h"
#include "memory/views.h"
#include "shoal/error.h"

namespace shoal {

void Reducer::end_backward() {
  const std::lock_guard lock(mutex_);
  const torch::NoGradGuard no_grad;
  under_way_.reset();
  if (phase_ == Phase::local) {
    phase_ = Phase::idle;
    hide_local_gradients();
  }
  if (phase_ != Phase::running) return;
  if (in_backward_) clock_.mark(StepClock::backward_ends, step_);
  check_static_graph();
  mark_rest_ready();
  before_waiting();
  finish_step();
}

void Reducer::check_static_graph() const {
  if (!options_.static_graph || !in_backward_ || expected_arrivals_.empty()) return;
  for (size_t i = 0; i < gradients_.size(); ++i) {
    if (arrivals_[i] == expected_arrivals_[i]) continue;
    throw UsageError(
        fmt::format("static_graph: the gradient of {} came {} times, in the first step {} times: the graph "
                    "has changed",
                    gradients_[i].name, arrivals_[i], expected_arrivals_[i]));
  }
}

void Reducer::finish_step() {
  if (early_) release_finished(/*all=*/true);
  const double weight = wait_for_buckets();
  clock_.mark(StepClock::all_back, step_);
  if (std::isnan(weight)) {
    const auto text = fmt::format("step {} was abandoned by {}, which failed; its gradients are void on all ranks",
                                  step_, who_failed());
    const auto own = std::exchange(hook_error_, nullptr);
    close_abandoned_step();
    after_abandoned();
    if (own) std::rethrow_exception(own);
    throw StepAbandoned(text);
  }
  if (holding_) {
    hold_back();
    learn();
    close_step();
    return;
  }
  if (!early_) deliver_all(weight);
  if (options_.consumer) {
    if (!early_) take_all();
    options_.consumer->end_step(/*abandoned=*/false);
    leave_spent();
  }
  release_finished();
  if (!by_hand_ && !options_.find_unused_parameters && !options_.static_graph && !options_.accept_unused) {
    for (size_t i = 0; i < gradients_.size(); ++i) {
      const bool unused = !used_anywhere_[i] && !came_anywhere_[i] && !frozen_[i];
      if (unused) unused_names_.push_back(gradients_[i].name);
    }
  }
  learn();
  close_step();
}

void Reducer::learn() {
  if (!learnt_ && !by_hand_) {
    learnt_ = true;
    order_from_ = lead();
    rebuild_due_ = exchange_->follows_order();
  }
  if (expected_arrivals_.empty() && in_backward_) expected_arrivals_ = arrivals_;
  clock_.end_step(/*finished=*/true);
}

void Reducer::deliver_all(double weight) {
  used_anywhere_.assign(gradients_.size(), false);
  if (facts_.defined()) {
    facts_.read(used_anywhere_, came_anywhere_);
    alike_ = facts_.alike(group_.size());
  }
  for (size_t i = 0; i < buckets_.size(); ++i) deliver(i, weight);
}

// The sum of the ranks' weights; NaN when one of them has abandoned the step.
double Reducer::wait_for_buckets() {
  double weight = group_.size();
  bool abandoned = void_;
  const auto read = [&](double sum, bool exact) {
    abandoned = abandoned || std::isnan(sum);
    if (exact) weight = sum;
  };
  timed(options_.timers.get(), "grads-reduce-scatter", 1, [this] {
    // What is further may fail yet, and then facts say so.
    const bool early = std::none_of(sums_.begin(), sums_.end(), [](const auto& sum) { return bool(sum.further); });
    if (early) issue_facts();
    for (auto round = advance(sums_); !round.empty();) round = advance(round);
    if (!early) issue_facts();
    facts_work_.wait();
  });
  for (size_t i = early_ ? buckets_.size() : 0; i < buckets_.size(); ++i) {
    const auto& bucket = buckets_[i];
    if (rests(i)) continue;
    if (bucket.sparse()) {
      read(sparse_[i]->weight, true);
    } else if (bucket.facts().defined()) {
      read(bucket.facts().weight(), bucket.facts().exact());
    }
  }
  if (facts_.defined()) read(facts_.weight(), true);
  return abandoned ? std::nan("") : weight;
}

// Completes all in their order, and begins what is further. What a hook throws meanwhile ends the step on all ranks; it
// is called once more, since its peers have called its collectives.
std::vector<PendingExchange> Reducer::advance(std::vector<PendingExchange>& sums) {
  std::vector<PendingExchange> next;
  const auto fail = [this] {
    if (!hook_error_) hook_error_ = std::current_exception();
    failed_ = true;
  };
  for (auto& sum : sums) {
    sum.work.wait();
    try {
      sum.complete();
    } catch (...) {
      fail();
    }
    const auto further = std::exchange(sum.further, {});
    if (!further) continue;
    try {
      next.push_back(further());
    } catch (const CommError&) {
      throw;
    } catch (...) {
      fail();
      next.push_back(further());
    }
  }
  return next;
}

// Which ranks gave up. Collective over all ranks of an abandoned step.
std::string Reducer::who_failed() {
  auto all = at::empty({group_.size()}, at::kLong);
  group_.all_gather(all, at::full({1}, failed_ ? 1 : 0, at::kLong), {step_, -1, "who failed"}).wait();
  std::vector<int> ranks;
  for (int rank = 0; rank < group_.size(); ++rank) {
    if (all[rank].item<int64_t>() != 0) ranks.push_back(group_.world_rank(rank));
  }
  return fmt::format("rank {}", fmt::join(ranks, ", "));
}

void Reducer::deliver(size_t index, double weight) {
  auto& bucket = buckets_[index];
  if (rests(index)) return;
  if (bucket.sparse()) return deliver_sparse(index);
  if (bucket.facts().defined()) bucket.facts().read(used_anywhere_, came_anywhere_);
  if (bucket.kept_range().empty() && !exchange_->everywhere()) return leave_parts(index);
  auto sum = bucket.kept();
  if (const auto held = earlier_.take_held(index); held.defined()) sum.add_(held);
  const double factor = group_.size() / weight;
  // Without any weight on any rank there was no sample: the sum is zero as it stands.
  if (factor != 1.0 && weight > 0) sum.mul_(factor);
  if (options_.leave_grad && bucket.kept_range().size() == bucket.payload_numel()) {
    deliver_whole(index);
    return;
  }
  leave_parts(index);
}

// A gradient that no rank used stays what it was.
void Reducer::leave_parts(size_t index) {
  for (const auto member : buckets_[index].members()) {
    if (kept_[member].defined() && !used_anywhere_[member]) gradients_[member].parameter.mutable_grad() = kept_[member];
  }
  earlier_.leave_parts(index, used_anywhere_);
}

void Reducer::deliver_whole(size_t index) {
  auto& bucket = buckets_[index];
  for (size_t place = 0; place < bucket.members().size(); ++place) {
    const auto member = bucket.members()[place];
    const auto& view = bucket.view(place);
    auto& grad = gradients_[member].parameter.mutable_grad();
    const bool sum =
        exchange_->everywhere() ? used_anywhere_[member] : earlier_.leave_whole(member, view, used_anywhere_[member]);
    if (!sum) {
      if (kept_[member].defined()) at::Tensor(view).copy_(kept_[member]);
    } else if (gradients_[member].travels_as) {
      grad = view.to(gradients_[member].parameter.scalar_type());  // optimizers take no other
      if (!exchange_->everywhere()) earlier_.leave_apart(member);
    } else if (options_.gradient_as_bucket_view) {
      if (!same_view(grad, view)) grad = view;
    } else if (grad.defined() && grad.layout() == at::kStrided) {
      grad.detach().copy_(view);
    } else {
      grad = view.clone();
    }
  }
}

void Reducer::deliver_sparse(size_t index) {
  const auto member = buckets_[index].members().front();
  auto& result = *sparse_[index];
  if (result.present > 0) {
    used_anywhere_[member] = came_anywhere_[member] = true;
    if (result.weight > 0) result.sum.mul_(1.0 / result.weight);
  }
  if (!exchange_->everywhere()) {
    if (exchange_->keeps_whole(buckets_[index], exchange_->place(group_.rank()))) {
      earlier_.leave_sparse(member, result.sum);
    } else {
      earlier_.leave_parts(index, used_anywhere_);
    }
  } else if (result.present > 0) {
    gradients_[member].parameter.mutable_grad() = result.sum;
  }
}

void Reducer::close_step() {
  phase_ = Phase::idle;
  expected_ = false;
  failed_ = false;
  reached_.assign(gradients_.size(), false);
  inspected_ = false;
  by_hand_ = false;
  if (!std::exchange(holding_, false)) {
    used_.assign(gradients_.size(), false);
    came_.assign(gradients_.size(), false);
    weight_.reset();
  }
  unmark_local_gradients();
  sums_.clear();
  sparse_.clear();
  kept_.clear();
  spare_.clear();
  ++step_;
}

void Reducer::close_abandoned_step() {
  clock_.end_step(/*finished=*/false);
  exchange_->step_abandoned();
  holding_ = false;
  earlier_.forget_held();
  if (!exchange_->everywhere()) {
    for (size_t i = 0; i < buckets_.size(); ++i) drop_gradients(i);
    earlier_.put_back();
  }
  if (options_.consumer) {
    for (auto& gradient : gradients_) gradient.parameter.mutable_grad().reset();  // nobody else zeroes them
    options_.consumer->end_step(/*abandoned=*/true);
  }
  if (!learnt_) order_.clear();
  close_step();
}

void Reducer::unmark_local_gradients() {
  if (!std::exchange(local_, false)) return;
  for (const auto& gradient : gradients_) unmark_local(gradient.parameter);
}

void Reducer::adopt_arrival_order() {
  rebuild_due_ = false;
  // One rank's order counts; what it did not see follows as registered, last first.
  std::vector<bool> listed(gradients_.size());
  for (const auto i : order_) listed[i] = true;
  for (size_t i = gradients_.size(); i-- > 0;) {
    if (!listed[i]) order_.push_back(i);
  }
  auto order = at::empty({static_cast<int64_t>(order_.size())}, at::kLong);
  std::copy(order_.begin(), order_.end(), order.data_ptr<int64_t>());
  group_.broadcast(order, order_from_, {step_, -1, "order of gradients"}).wait();
  const auto* begin = order.data_ptr<int64_t>();
  order_.assign(begin, begin + order.numel());
  build(order_);
  rebuilt_ = true;
}

std::optional<Reducer::LearntOrder> Reducer::learnt_order() const {
  if (!learnt_ || !exchange_->follows_order()) return std::nullopt;
  return LearntOrder{order_, order_from_};
}

void Reducer::go_on_from(const std::optional<LearntOrder>& learnt) {
  if (!exchange_->follows_order()) return;
  if (!learnt && learnt_ && !rebuild_due_) build_as_registered();
  learnt_ = rebuild_due_ = learnt.has_value();
  order_ = learnt ? learnt->order : std::vector<size_t>();
  order_from_ = learnt ? learnt->from : 0;
}

void Reducer::check_last_step() {
  if (unused_names_.empty()) return;
  const auto names = std::exchange(unused_names_, {});
  throw UsageError(
      fmt::format("no rank computed a gradient for {} in the last step. If a block is recomputed in backward, set "
                  "static_graph; if one forward has several backwards (of different outputs), call all but the last "
                  "under no_sync(), or set find_unused_parameters; else use these parameters in the loss, freeze them "
                  "(requires_grad_(false)) or ignore them, or set find_unused_parameters",
                  fmt::join(names, ", ")));
}

void Reducer::backward(const at::Tensor& loss_sum, double weight) {
  if (!std::isfinite(weight) || weight < 0) {
    throw UsageError(fmt::format("backward: weight {} must be finite and not negative", weight));
  }
  const bool has_graph = loss_sum.defined() && loss_sum.requires_grad();
  if (!has_graph && weight > 0) throw UsageError("backward: the loss does not depend on any trainable parameter");
  if (phase_ != Phase::running) adopt_changes();
  weight_ = weight_.value_or(0.0) + weight;
  weighted_backward_ = true;
  try {
    if (has_graph) {
      loss_sum.backward();
    } else if (synchronises()) {
      reduce_now();
    }
  } catch (...) {
    weighted_backward_ = false;
    if (synchronises()) mark_failed();
    throw;
  }
  weighted_backward_ = false;
}

void Reducer::reduce_now() {
  begin_now();
  end_now();
}

void Reducer::begin_now() {
  const std::lock_guard lock(mutex_);
  const torch::NoGradGuard no_grad;
  begin_backward();
  if (phase_ == Phase::running) mark_rest_ready();
}

void Reducer::end_now() {
  end_backward();
}

void Reducer::require_absence() const {
  if (attendance_ && !attendance_->here) return;
  throw UsageError("shadow: for a step of a Join scope in which this rank has no batch; call forward and backward");
}

void Reducer::attend(const std::optional<Attendance>& attendance) {
  attendance_ = attendance;
  if (attendance && attendance->here) attended_step_ = step_;
}

void Reducer::abandon() {
  const std::lock_guard lock(mutex_);
  const torch::NoGradGuard no_grad;
  if (!failed_ && phase_ != Phase::running) {
    phase_ = Phase::idle;
    weight_.reset();
    used_.assign(gradients_.size(), false);
    came_.assign(gradients_.size(), false);
    earlier_.forget_held();
    return;
  }
  failed_ = true;
  note(group_, fmt::format("gave up step {}", step_));
  try {
    before_writing();
    if (phase_ != Phase::running) {
      adopt_changes();
      begin_step();
    }
    for (; next_ < buckets_.size(); ++next_) {
      if (rests(next_)) continue;
      for (const auto member : buckets_[next_].members()) earlier_.set_aside(member);
      if (!buckets_[next_].sparse()) {
        buckets_[next_].acquire(group_, spare_);
        buckets_[next_].flat().zero_();
      }
      issue(next_);
    }
    if (early_) release_finished(/*all=*/true);
    before_waiting();
    if (std::isnan(wait_for_buckets())) who_failed();
    hook_error_ = nullptr;
  } catch (const CommError&) {  // NOLINT(bugprone-empty-catch): there is nobody left to tell; the next call says so
  } catch (...) {
    close_step();
    throw;
  }
  close_abandoned_step();
}

}  // namespace shoal
