// Second half of a step: results are delivered, or the step is abandoned.

#include <c10/util/ScopeExit.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/utils.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "comm/group/group_state.h"
#include "engine/reducer/reducer.h"
#include "shoal/error.h"

namespace shoal {
namespace {

// One number of each rank. Collective.
std::vector<int64_t> of_all_ranks(const Group& group, int64_t own, const Label& label) {
  auto all = at::empty({group.size()}, at::kLong);
  group.all_gather(all, at::full({1}, own, at::kLong), label).wait();
  const auto* begin = all.data_ptr<int64_t>();
  return {begin, begin + all.numel()};
}

// "rank 1, 2", by their numbers in the world; empty: none.
std::string ranks_with(int64_t number, const std::vector<int64_t>& of_ranks, const Group& group) {
  std::vector<int> ranks;
  for (int rank = 0; rank < group.size(); ++rank) {
    if (of_ranks[static_cast<size_t>(rank)] == number) ranks.push_back(group.world_rank(rank));
  }
  return ranks.empty() ? "" : fmt::format("rank {}", fmt::join(ranks, ", "));
}

}  // namespace

void Reducer::end_local_backward() {
  accumulated_.end_graphs(/*local=*/true);
  if (accumulated_.weight()) accumulated_.note_values();
  if (!options_.leave_grad) accumulated_.hide();
}

void Reducer::end_backward(EndStage stage) {
  const TimedScope scope(timeline_of(group_), "hook", steps_);
  if (stage == EndStage::await) return await_step();
  if (stage == EndStage::deliver) return deliver_step();
  if (step_->from == Step::From::backward) {
    clock_.mark(StepClock::backward_ends, steps_);
    tracker_.require_all_arrivals();
  }
  mark_rest_ready();
}

void Reducer::await_step() {
  const double weight = wait_for_sums();
  step_->weight = weight;
  clock_.mark(StepClock::all_back, steps_);
  const auto own = step_->hook_error;
  if (own) last_.hook_error = own;
  // Without a hook, the trailer has gone before sums end: if one fails there, the other ranks do not know.
  if (std::isnan(weight) || own) {
    const auto failed = std::isnan(weight) ? who_failed() : "this rank";
    const auto text = fmt::format(
        "step {} was abandoned on all ranks, because {} failed in it; its gradients are invalid: call zero_grad() and "
        "continue with the next step",
        steps_, failed);
    close_abandoned_step();
    callbacks.after_abandoned();
    if (own) std::rethrow_exception(own);
    if (!last_.apart.empty()) throw UsageError(last_.apart);
    throw StepAbandoned(text);
  }
  if (step_->behind) refuse_step_of_two();
}

double Reducer::wait_for_sums() {
  auto noticed = c10::make_scope_exit([this] { step_->interrupted = true; });
  try {
    callbacks.before_waiting();
    if (step_->schedule.next() < buckets_.size()) {
      throw std::logic_error(fmt::format("shoal: bucket {} of {} was not reduced in step {}; this is a fault of shoal",
                                         step_->schedule.next(), buckets_.size(), steps_));
    }
    if (step_->early) release_finished(/*all=*/true);
    const double weight = wait_for_buckets();
    noticed.release();
    return weight;
  } catch (const Error&) {  // which other ranks have, too
    noticed.release();
    throw;
  }
}

void Reducer::deliver_step() {
  if (entry_.holding) {
    hold_back();
    learn();
    close_step();
    return;
  }
  if (!step_->early) deliver_all(*step_->weight);
  if (consumed_) {
    if (!step_->early) consumed_->take_all();
    consumed_->end_step(step_->used_anywhere);
  }
  release_finished();
  if (step_->from != Step::From::caller && !options_.find_unused_parameters && !options_.static_graph &&
      !options_.accept_unused) {
    for (size_t i = 0; i < gradients_.size(); ++i) {
      const bool trains = !buckets_.frozen(i) && gradients_[i].parameter.requires_grad();
      const bool unused = trains && !step_->used_anywhere[i] && !step_->came_anywhere[i];
      if (unused) last_.unused_names.push_back(gradients_[i].name);
    }
  }
  last_.used_anywhere = std::move(step_->used_anywhere);
  learn();
  close_step();
}

void Reducer::learn() {
  if (step_->from != Step::From::caller) order_.learn(tracker_.order(), lead());
  if (step_->from == Step::From::backward) tracker_.expect_the_same();
  clock_.end_step(/*finished=*/true);
}

// The sum of the ranks' weights; NaN if a rank abandoned the step.
double Reducer::wait_for_buckets() {
  double weight = group_.size();
  bool abandoned = step_->abandoned;
  const auto read = [&](double sum, bool exact) {
    abandoned = abandoned || std::isnan(sum);
    if (exact) weight = sum;
  };
  timed(options_.timers.get(), "grads-reduce-scatter", 1, [this] {
    // A hook or a second stage may still fail; then the trailer must be issued after it, to say so.
    const auto& sums = step_->schedule.sums();
    const bool early = reduction_->hook() == nullptr &&
                       std::none_of(sums.begin(), sums.end(), [](const auto& sum) { return bool(sum.next_stage); });
    if (early) issue_trailer();
    if (callbacks.after_sum) release_finished(/*all=*/true);  // what follows a sum waits for no other
    for (auto round = advance(step_->schedule.sums()); !round.empty();) round = advance(round);
    if (!early) issue_trailer();
    step_->trailer_work.wait();
  });
  for (size_t i = step_->early ? buckets_.size() : 0; i < buckets_.size(); ++i) {
    const auto& bucket = buckets_[i];
    if (buckets_.all_frozen(i)) continue;
    if (bucket.sparse()) {
      read(step_->sparse[i]->weight, true);
    } else if (bucket.trailer().defined()) {
      read(bucket.trailer().weight(), bucket.trailer().exact());
      step_->behind = step_->behind || bucket.trailer().some_are_behind(group_.size());
    }
  }
  if (buckets_.trailer().defined()) {
    read(buckets_.trailer().weight(), true);
    step_->behind = buckets_.trailer().some_are_behind(group_.size());
  }
  return abandoned ? std::nan("") : weight;
}

// Completes all sums in order and begins their next stages. If a hook throws, the step ends on all ranks; the hook is
// called once more, because its peers have called its collectives.
std::vector<PendingExchange> Reducer::advance(std::vector<PendingExchange>& sums) {
  std::vector<PendingExchange> next;
  for (auto& sum : sums) {
    complete(sum);
    const auto next_stage = std::exchange(sum.next_stage, {});
    if (!next_stage) continue;
    try {
      next.push_back(next_stage());
    } catch (const CommError&) {
      throw;
    } catch (...) {
      note_hook_error();
      next.push_back(next_stage());
    }
  }
  return next;
}

// Ranks complete different sums, and at different times: a hook that throws there ends the step at its end.
void Reducer::complete(PendingExchange& sum) {
  sum.work.wait();
  try {
    sum.complete();
  } catch (...) {
    note_hook_error();
  }
}

// In a catch block.
void Reducer::note_hook_error() {
  if (!step_->hook_error) step_->hook_error = std::current_exception();
  entry_.failed = true;
}

// Names the ranks that gave up, or says in last_.apart that ranks are apart. Collective over all ranks of an abandoned
// step.
std::string Reducer::who_failed() {
  enum : int64_t { well, failed, missed };
  const auto all = of_all_ranks(group_,
                                last_.missed    ? missed
                                : entry_.failed ? failed
                                                : well,
                                {steps_, -1, "who failed"});
  const auto late = ranks_with(missed, all, group_);
  if (std::count(all.begin(), all.end(), missed) == group_.size()) {  // in the same step, so that nobody has used it
    last_.missed = false;
    return late;
  }
  if (!late.empty()) {
    last_.apart = fmt::format(
        "step {}: an exception, of a signal handler perhaps, ended an earlier backward of {} while it waited for sums "
        "of gradients, to which it had given its own. The other ranks have used these sums, so that parameters differ. "
        "Let such an exception end the program, or load a checkpoint and make a new wrapper",
        steps_, late);
  }
  return ranks_with(failed, all, group_);
}

// Ranks stay apart by a step, so that later ones are refused, too.
void Reducer::refuse_step_of_two() {
  const auto text = fmt::format(
      "step {}: {} ran a forward whose result was dropped without a backward, and the other ranks did not, so that "
      "batches of two steps may have met. A forward that needs no backward (a target's value, an evaluation) belongs "
      "into torch::NoGradGuard (torch.no_grad()). Where a step ends between forward and backward (an exception that is "
      "caught, a batch that is skipped), call abandon_step() on that rank, and the others get StepAbandoned. Make "
      "a new wrapper to go on",
      steps_,
      ranks_with(1, of_all_ranks(group_, has_dropped_forward() ? 1 : 0, {steps_, -1, "who has dropped a forward"}),
                 group_));
  close_abandoned_step();
  callbacks.after_abandoned();
  last_.apart = text;
  throw UsageError(text);
}

void Reducer::close_step() {
  forget_failed(*this);
  tracker_.enter(BackwardTracker::Phase::idle);
  step_.reset();
  if (!std::exchange(entry_, {}).holding) {
    // A backward of several steps (BackwardTracker::Options::splits) has one weight, which counts in each.
    if (weighing_ != Weighing::none) weighing_ = Weighing::spent;
    const auto weight = weighing_ == Weighing::spent ? accumulated_.weight() : std::nullopt;
    accumulated_.forget();
    accumulated_.set_weight(weight);
  }
  accumulated_.unmark();
  buckets_.drop_spare();
  ++steps_;
}

// After a failed backward (in_flight) before the program gets control, which zeroes gradients or goes on to step();
// else when the step ends.
void Reducer::give_up_gradients(bool in_flight) {
  if (!running() || std::exchange(step_->given_up, true)) return;
  step_->issues_last.reset();
  const bool everywhere = reduction_->plan().everywhere();
  for (size_t i = 0; i < gradients_.size(); ++i) {
    const auto index = buckets_.places()[i].bucket;
    auto& grad = gradients_[i].parameter.mutable_grad();
    if (options_.consumer) {
      grad.reset();  // nobody else zeroes them
    } else if (!everywhere) {
      accumulated_.drop_own(i);
    } else if (buckets_.all_frozen(index)) {
      continue;  // not in the step
    } else if (!buckets_.frozen(i)) {
      accumulated_.give_up(i, in_flight);
    } else if (step_->untouched[i].defined()) {
      grad = step_->untouched[i];
    }
  }
  if (in_flight && !everywhere) accumulated_.sums().show_aside();
}

void Reducer::backward_failed(const BackwardPlace& where) {
  if (running()) give_up_gradients(/*in_flight=*/true);
  if ((running() || has_thrown()) && !callbacks.take_turns) note_failed(*this, where);
}

void Reducer::close_abandoned_step() {
  clock_.end_step(/*finished=*/false);
  if (auto* hook = reduction_->hook()) hook->reset();
  entry_.holding = false;
  accumulated_.sums().forget_held();
  give_up_gradients(/*in_flight=*/false);
  if (!reduction_->plan().everywhere()) accumulated_.sums().put_back();
  if (consumed_) consumed_->abandon_step();
  close_step();
}

}  // namespace shoal
