#pragma once
// Mean of gradients over a group, made while backward runs: gradients arrive, buckets fill, collectives leave in a
// fixed order, means come back.

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/buckets/bucket_order.h"
#include "engine/gradients/accumulated_gradients.h"
#include "engine/gradients/backward_tracker.h"
#include "engine/gradients/spent_gradients.h"
#include "engine/reducer/gradient_consumer.h"
#include "engine/reducer/gradient_reduction.h"
#include "engine/reducer/step.h"
#include "engine/reducer/step_clock.h"
#include "shoal/group.h"
#include "shoal/join.h"
#include "shoal/telemetry.h"

namespace shoal {

struct ReducerOptions {
  bool gradient_as_bucket_view = true;
  bool find_unused_parameters = false;
  bool static_graph = false;
  bool leave_grad = true;    // grad() shows the sum where this rank keeps the whole of a gradient, and until then this
                             // rank's own; else both lie in the bucket alone
  std::string about_sums{};  // of an operator that takes a gradient that is not in grad(): where it is, and what to
                             // call; after "<operator> takes the gradient of parameter p, "
  bool accept_unused = false;  // parameters that no rank used are no error
  BucketSchedule::Limits limits{};
  std::shared_ptr<GradientConsumer> consumer{};  // uses the means up; with a reduction whose sums are used up
  std::string name_of_consumer{};                // for errors
  std::shared_ptr<Timers> timers{};  // measure as "grads-reduce-scatter" what backward does not hide of the reduction
};

// Questions of a reducer to its wrapper, and what it tells it.
struct ReducerCallbacks {
  // Whether the next backward synchronises (asked when its first gradient arrives).
  std::function<bool()> synchronises = [] { return true; };
  // Whether the sums of the next backward that synchronises are held back: not added up across the smaller groups of
  // a reduction in two stages, nor delivered, but added to those of the next one that is not held back. A step of its
  // own to the ranks; its weight and its used gradients count in that one.
  std::function<bool()> holds_back = [] { return false; };
  // Called before a backward or an abandoned step writes to the buckets: whoever uses their memory meanwhile ends that.
  std::function<void()> before_writing = [] {};
  // Called when this rank's backward has issued all buckets, before it waits for the others.
  std::function<void()> before_waiting = [] {};
  // Whether full buckets may leave now; otherwise they do with the next one that is full. `last`: this rank has no more
  // to add, and they must: whatever has to leave before them does so in this call.
  std::function<bool(bool last)> may_leave = [](bool) { return true; };
  // Called when a step has ended abandoned on all ranks, before its backward throws that.
  std::function<void()> after_abandoned = [] {};
};

// Averages gradients over a group while backward runs.
//
// A step is one backward that synchronises, with the local ones before it. Its life:
//   idle --before the first gradient--> running --end of the outermost backward--> idle
// Every rank issues all buckets in every step, in the same order, whatever its own graph used: a parameter without a
// gradient here contributes zero, and the flags in the bucket say who used what. So ranks may run different modules.
// A rank that cannot finish its step issues the rest with a weight of NaN (abandon), so that its peers do not wait.
//
// Where sums do not reach every rank, this rank's grad() is left only where it keeps the whole of a gradient; of one
// that it keeps a part of, the part lies in the bucket (Bucket::kept), and in grad() is a stand-in. A sum that is still
// there when the next step begins is set aside and added to the next one (earlier_sums.h).
//
// Each rank's gradients go in scaled by 1 / ranks, so that 16-bit sums stay in range; the result is corrected by
// ranks / weight only where weights were given.
class Reducer : private BackwardListener {
 public:
  Reducer(std::vector<Gradient> gradients, const Group& group, const ReducerOptions& options,
          std::unique_ptr<GradientReduction> reduction);
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  ReducerCallbacks callbacks;

  // Throws what the last step left to say: UsageError for parameters that no rank used. Same on all ranks.
  void check_last_step();
  // See BackwardTracker.
  void inspect(const std::vector<at::Tensor>& outputs) { tracker_.inspect(outputs); }
  // A backward of a loss that is a sum over `weight`; see DistributedDataParallel::backward.
  void backward(const at::Tensor& loss_sum, double weight);

  // Sums are gone, as after zero_grad().
  void drop_sums() { accumulated_.sums().drop_all(); }
  // Between steps, before an optimizer looks at the sums (Bucket::kept): what has been done to grad() counts, and a
  // gradient that was set there is the sum. UsageError, on behalf of `who`, for gradients that ranks have not summed
  // up.
  void prepare_sums(const std::string& who);
  // Whether there is a sum, after prepare_sums(); false: no rank has used the gradient, or it was dropped.
  bool has_sum(size_t gradient) const { return accumulated_.sums().has_part(gradient); }
  // See EarlierSums.
  void spoil_sums(std::string why, bool add_only = false) { accumulated_.sums().spoil(std::move(why), add_only); }
  void require_addable_sums() const { accumulated_.sums().require_addable(); }
  // This rank has entered a step that its peers will finish or wait for; if it does not, abandon() must follow.
  // Collective once, after the first finished step: buckets are rebuilt.
  void expect_backward();
  // Something failed: the step cannot be finished here. No fault of a step that no forward has entered.
  void mark_failed() { entry_.failed = entry_.expected || running(); }
  // True when a step was begun here and neither finished nor abandoned.
  bool broken() const { return entry_.failed || running(); }
  // Synchronises what local backwards have left, without a backward. Collective.
  void reduce_now();
  // In two halves, for reducers whose buckets leave in turns: all buckets; the rest.
  void begin_now();
  void end_now();
  // Who has a batch from now on; nothing: everybody has.
  void set_join_state(const std::optional<JoinState>& join_state);
  const std::optional<JoinState>& join_state() const { return join_state_; }
  // The lowest rank that has one.
  int lead() const { return join_state_ ? join_state_->first : 0; }
  // UsageError unless this rank has none.
  void require_absence() const;
  // Ends a step that was left broken.
  void settle() {
    if (broken()) abandon();
  }
  // Ends a step that was begun and neither finished nor abandoned on all ranks; they get StepAbandoned. Collective with
  // the peers' step. Without such a step it only forgets what local backwards have left.
  void abandon();

  // Whether a backward has given this gradient since the last step.
  bool used_here(size_t gradient) const { return accumulated_.used()[gradient]; }
  // What local backwards have left of it, in its place in the bucket, where it may be changed before reduce_now(). Zeros
  // where there is nothing; either way it counts as used from now on.
  at::Tensor local_gradient(size_t gradient);
  // Whether a backward that synchronises has begun and not ended.
  bool running() const { return step_.has_value(); }
  // The wrapper has gone, and with it what its callbacks use: backwards are the caller's own from now on. What has been
  // summed up stays for an optimizer that outlives it.
  void detach();
  // UsageError where a backward after that has left a gradient.
  void require_seen_gradients() const;

  std::vector<std::vector<std::string>> bucket_names() const;
  int64_t step() const { return steps_; }
  // Takes the place of one that has made so many steps.
  void count_from(int64_t step) {
    steps_ = step;
    last_.used_anywhere.assign(gradients_.size(), true);  // as far as is known
  }
  const Group& group() const { return group_; }
  const std::vector<Gradient>& gradients() const { return gradients_; }
  const std::vector<Bucket>& buckets() const { return buckets_.all(); }
  const GradientReduction& reduction() const { return *reduction_; }
  std::vector<at::Tensor> parameters_of(const Bucket& bucket) const;
  // What each of the first `ranks` ranks keeps of a bucket.
  std::vector<Range> owners_of(const Bucket& bucket, int ranks) const;
  // See BucketOrder. Going on from one: between steps, the same on all ranks, like a step.
  std::optional<BucketOrder::Learnt> learnt_order() const { return order_.learnt(); }
  void go_on_from(const std::optional<BucketOrder::Learnt>& learnt);

  // Gradients that do not come until further notice, the same on all ranks: of frozen parameters. Buckets of theirs
  // alone rest: they do not travel, and what lies in them stays. Between steps.
  void set_frozen(std::vector<bool> frozen) { buckets_.set_frozen(std::move(frozen)); }
  // Between steps, for a reducer that takes this one's place: sums that were left, and micro-batches' gradients that
  // have come since. By parameter.
  AccumulatedGradients::Left left();
  void resume(const AccumulatedGradients::Left& left);
  // Reduces gradients that lie in grad() and have not been reduced: what backwards under no_sync have left, what the
  // caller has set. A step of its own. Collective.
  void reduce_pending();
  // Whether a gradient has come on this rank that has not been reduced yet.
  bool has_local(size_t gradient) const {
    return used_here(gradient) && gradients_[gradient].parameter.grad().defined();
  }

  // For logging, see LoggingData.
  StepClock& clock() { return clock_; }
  const StepClock& clock() const { return clock_; }
  const std::vector<int64_t>& first_bucket_bytes() const { return first_bucket_bytes_; }
  std::vector<int64_t> bucket_bytes() const;
  bool rebuilt() const { return order_.followed(); }
  std::vector<size_t> unused() const;  // gradients that no rank used in the last step

 private:
  // BackwardListener
  void begin_backward() override;
  void arriving(size_t gradient) override;
  void arrived(size_t gradient) override;
  void end_local_backward() override;
  void end_backward() override;

  // reducer.cpp: gradients arrive
  void adopt_changes();
  void begin_step(Step::From from);
  void count_arrival(size_t gradient);
  void mark_ready(size_t gradient);
  void mark_rest_ready();
  void issue_ready_buckets(bool last = false);
  void issue(size_t bucket);
  void issue_trailer();
  double issued_weight() const;
  Label label(size_t bucket) const;
  void build(const std::vector<size_t>& order);
  void build_as_registered();

  // reducer_deliver.cpp: means, memory of buckets, and their consumer
  void deliver_all(double weight);
  void deliver(size_t bucket, double weight);
  void deliver_whole(size_t bucket);
  void leave_parts(size_t bucket);
  void deliver_sparse(size_t bucket);
  void release_finished(bool all = false);
  bool knows_means_early() const;
  void take_early(size_t bucket);
  void take_all();
  void take(size_t bucket);
  void leave_spent();

  // reducer_held.cpp: sums that are held back
  PendingExchange with_held(size_t bucket, PendingExchange sum);
  void hold_back();

  // reducer_step.cpp: the end of a step
  void finish_step();
  double wait_for_buckets();
  std::vector<PendingExchange> advance(std::vector<PendingExchange>& sums);
  std::string who_failed();
  void learn();
  void close_step();
  void close_abandoned_step();

  std::vector<Gradient> gradients_;
  Group group_;
  std::string whose_;  // of the group's reducers, for labels
  ReducerOptions options_;
  std::unique_ptr<GradientReduction> reduction_;

  BucketSet buckets_;
  BucketOrder order_;
  std::vector<int64_t> first_bucket_bytes_;

  bool weighted_backward_ = false;
  StepEntry entry_;
  std::optional<Step> step_;  // while one runs
  LastStep last_;
  int64_t steps_ = 0;
  StepClock clock_;

  std::optional<JoinState> join_state_;
  int64_t attended_step_ = -1;  // the last step for which this rank had a batch

  AccumulatedGradients accumulated_;
  std::optional<SpentGradients> spent_;  // with a consumer
  BackwardTracker tracker_;              // last: it calls
};

}  // namespace shoal
