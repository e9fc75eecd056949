#pragma once
// Reducer: averages gradients over a group while backward runs.

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/buckets/bucket_order.h"
#include "engine/gradients/accumulated_gradients.h"
#include "engine/gradients/backward_tracker.h"
#include "engine/reducer/consumed_gradients.h"
#include "engine/reducer/failed_steps.h"
#include "engine/reducer/gradient_delivery.h"
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
  // Where this rank keeps the whole sum, grad() shows this rank's own gradient until the sum has come, and then the
  // sum. False: both lie in the bucket alone.
  bool leave_grad = true;
  // Error text for an operator that takes a gradient that is not in grad(): where the gradient is, and what to call. It
  // follows "<operator> takes the gradient of parameter p, ".
  std::string about_sums{};
  bool accept_unused = false;  // parameters that no rank used are not an error
  // For errors: what to do where a backward computes gradients more than once, if there is no option static_graph.
  std::string about_repeats{};
  BucketSchedule::Limits limits{};
  // Consumes the means within backward; needs a reduction with ReductionPlan::consumed.
  std::shared_ptr<GradientConsumer> consumer{};
  std::string name_of_consumer{};  // for errors
  // Records, as "grads-reduce-scatter", the part of the reduction that backward does not hide.
  std::shared_ptr<Timers> timers{};
};

// Callbacks to the wrapper.
struct ReducerCallbacks {
  // Whether the next backward synchronises; called when its first gradient arrives.
  std::function<bool()> synchronises = [] { return true; };
  // Whether to hold back the sums of the next synchronising backward: they are summed within the smaller groups of a
  // two-stage reduction only and not delivered, but added to the sums of the next step that is not held back. Ranks
  // count it as a step; its weight and used gradients count in that later step.
  std::function<bool()> holds_back = [] { return false; };
  // Called before the first gradient of each backward.
  std::function<void()> before_backward = [] {};
  // The factor of this rank's gradients in the mean, in steps without weights; none: 1 / ranks.
  std::function<std::optional<double>()> share = [] { return std::nullopt; };
  // Called before a backward or an abandoned step writes to buckets; other users of that memory must finish now.
  std::function<void()> before_writing = [] {};
  // Called after this rank has issued all buckets, before it waits for them.
  std::function<void()> before_waiting = [] {};
  // Whether several reducers issue their buckets in an order of their own, see may_leave.
  bool take_turns = false;
  // Whether full buckets may be issued now; if not, the next full bucket asks again. last: this rank adds nothing more
  // and the buckets must be issued; the callback first issues what has to precede them.
  std::function<bool(bool last)> may_leave = [](bool) { return true; };
  // Called after a step was abandoned on all ranks, before the backward throws StepAbandoned.
  std::function<void()> after_abandoned = [] {};
  // Chains messages between ranks to the reduction of a bucket, which begin in the order of buckets as soon as each is
  // reduced; nullptr: there are none.
  std::function<PendingExchange(PendingExchange sum, size_t bucket, const Label& label)> after_sum{};
};

// Averages gradients over a group while backward runs.
//
// A step is one synchronising backward together with the local backwards before it:
//   idle --before the first gradient--> running --end of the outermost backward--> idle
// Every rank issues all buckets in every step and in the same order, whatever its own graph used: a parameter without a
// gradient contributes zeros, and flags in the bucket say which rank used what. So ranks may run different modules. A
// rank that cannot finish its step issues the remaining buckets with a weight of NaN (abandon), so that its peers do
// not wait.
//
// Where sums do not reach every rank, grad() holds a sum only on a rank that keeps the whole of it. Elsewhere this
// rank's part lies in the bucket (Bucket::kept), and grad() holds a stand-in. A sum that still exists when the next
// step begins is set aside and added to the next sum (earlier_sums.h).
//
// Gradients are scaled by 1 / ranks (or ReducerCallbacks::share) before the reduction, so that 16-bit sums stay in
// range. The result is multiplied by ranks / weight if weights were given.
class Reducer final : private BackwardListener, private FailedStep {
 public:
  Reducer(std::vector<Gradient> gradients, const Group& group, const ReducerOptions& options,
          std::unique_ptr<GradientReduction> reduction);
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;
  ~Reducer();

  ReducerCallbacks callbacks;

  // Throws the last step's pending error: UsageError for parameters that no rank used. Same on all ranks.
  void check_last_step();
  void renew_hooks() { tracker_.renew_hooks(); }
  void note_forward() { tracker_.note_forward(); }
  // After a forward that builds a graph, outside no_sync. See BackwardTracker and DroppedForwards.
  // trains: whether it has entered a step in training mode; a module that is evaluated on some ranks needs no backward.
  void inspect(const std::vector<at::Tensor>& outputs, bool trains) {
    tracker_.inspect(outputs, trains ? entry_.forwards.note(outputs) : nullptr);
  }
  // Backward of a loss that is a sum over `weight` samples; see DistributedDataParallel::backward.
  void backward(const at::Tensor& loss_sum, double weight);

  // Sums that earlier steps left.
  EarlierSums& sums() { return accumulated_.sums(); }
  const EarlierSums& sums() const { return accumulated_.sums(); }
  // Call between steps, before an optimizer reads the sums (Bucket::kept): applies what the caller did to grad(), and
  // takes a gradient that the caller set as the sum. UsageError, naming `who`, for gradients that ranks have not
  // summed.
  void prepare_sums(const std::string& who);
  // UsageError if micro-batches have left gradients that no reduction has had yet.
  void require_none_local(const std::string& who);
  // Enters a step that the peers will finish or wait for; abandon() must follow if this rank does not finish it.
  // Collective once, after the first finished step, when buckets are rebuilt.
  void expect_backward();
  // Whether a forward has entered a step whose backward has not ended.
  bool awaits_backward() const { return entry_.expected || running(); }
  // Call before a forward under no_sync, which begins a step that is entered later.
  void note_micro_batch() { entry_.begun = true; }
  bool has_only_micro_batches() const { return entry_.begun && !awaits_backward(); }
  // Whether a Join has told the others that this rank has a batch in this step, and no forward has entered it yet.
  bool has_promised_batch() const {
    return join_state_ && join_state_->here && attended_step_ == steps_ && !awaits_backward();
  }
  // Marks the step as impossible to finish here. No effect unless a forward has entered a step.
  void mark_failed() {
    entry_.failed = entry_.expected || running();
    if (entry_.failed && !callbacks.take_turns) note_failed(*this);
  }
  // Whether this is what a communication hook threw here at the end of a step, which has ended on all ranks.
  bool has_ended_with(const std::exception_ptr& error) const { return error && error == last_.hook_error; }
  // Whether a step was begun here and neither finished nor abandoned.
  bool broken() const { return entry_.failed || has_thrown() || running(); }
  // Reduces the gradients of local backwards, without a backward. Collective.
  void reduce_now();
  // The two halves of reduce_now(), for reducers that take turns: issue all buckets; finish.
  void begin_now();
  void end_now();
  // Sets which ranks have a batch from now on; nothing: all of them.
  void set_join_state(const std::optional<JoinState>& join_state);
  const std::optional<JoinState>& join_state() const { return join_state_; }
  // The lowest rank that has a batch.
  int lead() const { return join_state_ ? join_state_->first : 0; }
  // UsageError if this rank has a batch.
  void require_absence() const;
  // Ends steps that have failed on this rank, of all reducers, and this one's if its backward has. For an optimizer,
  // whose own communication would meet that of these steps on the other ranks.
  void settle_failed_backward();
  // The same, but not if its backward runs still: a hook may evaluate in it.
  void settle();
  // Abandons a step that was begun and not finished, on all ranks; the peers get StepAbandoned. Collective with the
  // peers' step. Without such a step, only forgets gradients of local backwards.
  void abandon();

  // Whether a backward on this rank has computed this gradient since the last step.
  bool used_here(size_t gradient) const { return accumulated_.used()[gradient]; }
  // The accumulated local gradient in its bucket, for changes before reduce_now(). Zeros if there is none; it counts as
  // used either way.
  at::Tensor local_gradient(size_t gradient);
  // Whether a synchronising backward has begun and not ended.
  bool running() const { return step_.has_value(); }
  // Detaches the reducer from a wrapper that is being destroyed, and from its callbacks: later backwards are the
  // caller's own. Sums stay, for an optimizer that outlives the wrapper.
  void detach();
  // UsageError if a backward after detach() has computed a gradient.
  void require_seen_gradients() const;

  int64_t step() const { return steps_; }
  // Starts the count at `step`, for a reducer that replaces another.
  void count_from(int64_t step) {
    steps_ = step;
    last_.used_anywhere.assign(gradients_.size(), true);  // as far as is known
  }
  const Group& group() const { return group_; }
  const std::vector<Gradient>& gradients() const { return gradients_; }
  const BucketSet& buckets() const { return buckets_; }
  const GradientReduction& reduction() const { return *reduction_; }
  GradientConsumer* consumer() const { return options_.consumer.get(); }
  // See BucketOrder. Call resume_from() between steps, with the same argument on all ranks.
  const BucketOrder& order() const { return order_; }
  void resume_from(const std::optional<BucketOrder::Learnt>& learnt);

  // Marks gradients of frozen parameters, the same on all ranks. Buckets with frozen gradients only are not reduced and
  // keep their values. Call between steps.
  void set_frozen(std::vector<bool> frozen) { buckets_.set_frozen(std::move(frozen)); }
  // State for a reducer that replaces this one: sums that were left and gradients of local backwards, by parameter.
  // Call between steps.
  AccumulatedGradients::Left left();
  void resume(const AccumulatedGradients::Left& left);
  // Reduces gradients in grad() that have not been reduced: those of backwards under no_sync and those that the caller
  // set. Counts as a step. Collective.
  void reduce_pending();
  // Whether this rank has a gradient that has not been reduced yet.
  bool has_local(size_t gradient) const {
    return used_here(gradient) && gradients_[gradient].parameter.grad().defined();
  }

  // For logging, see LoggingData.
  StepClock& clock() { return clock_; }
  const StepClock& clock() const { return clock_; }
  std::vector<size_t> unused() const;  // gradients that no rank used in the last step

 private:
  // BackwardListener
  void begin_backward() override;
  void arriving(size_t gradient) override;
  void arrived(size_t gradient) override;
  void end_local_backward() override;
  void end_backward(EndStage stage) override;
  void backward_failed(const BackwardPlace& where) override;
  bool synchronises() const override { return callbacks.synchronises(); }
  bool ends_with_others() const override { return !callbacks.take_turns; }
  // FailedStep
  void send_rest() override;
  void end() override;

  // reducer.cpp: arrival of gradients
  void adopt_changes();
  void end_weighted_backward();
  [[noreturn]] void refuse_again(size_t gradient) const;
  void begin_step(Step::From from);
  void count_arrival(size_t gradient);
  void mark_ready(size_t gradient);
  void mark_rest_ready();
  void issue_ready_buckets(bool last = false);
  bool waits_for_end(size_t bucket);
  void issue(size_t bucket);
  void issue_trailer();
  double issued_weight() const;
  void write(StepTrailer& trailer) const;
  bool has_dropped_forward() const { return step_->from == Step::From::backward && entry_.forwards.any_dropped(); }
  double scale() const;
  // Whether this rank knows that the sum may be scaled after the reduction.
  bool may_scale_sum() const { return accumulated_.weight() || (join_state_ && !join_state_->by_initial_size); }
  Label label(size_t bucket) const;
  void build(const std::vector<size_t>& order);
  void build_as_registered();

  // reducer_sums.cpp: reduced buckets
  void deliver_all(double weight);
  void release_finished(bool all = false);
  void reuse_memory(size_t gradient);
  void take_early(size_t bucket);
  PendingExchange with_held(size_t bucket, PendingExchange sum);
  void hold_back();

  // reducer_step.cpp: end of a step
  // Whether its backward has thrown before the first gradient; another one may follow.
  bool has_thrown() const {
    return entry_.expected && tracker_.phase() == BackwardTracker::Phase::idle && tracker_.left_open();
  }
  void await_step();
  void deliver_step();
  double wait_for_sums();
  double wait_for_buckets();
  std::vector<PendingExchange> advance(std::vector<PendingExchange>& sums);
  void complete(PendingExchange& sum);
  void note_hook_error();
  std::string who_failed();
  [[noreturn]] void refuse_step_of_two();
  void learn();
  void close_step();
  void give_up_gradients(bool in_flight);
  void close_abandoned_step();

  std::vector<Gradient> gradients_;
  Group group_;
  std::string whose_;  // prefix of labels: which of the group's reducers this is
  ReducerOptions options_;
  std::unique_ptr<GradientReduction> reduction_;

  BucketSet buckets_;
  BucketOrder order_;

  enum class Weighing { none, under_way, spent };  // spent: a step of the backward with a weight has ended
  Weighing weighing_ = Weighing::none;
  StepEntry entry_;
  std::optional<Step> step_;  // while a step runs
  LastStep last_;
  int64_t steps_ = 0;
  StepClock clock_;

  std::optional<JoinState> join_state_;
  int64_t attended_step_ = -1;  // last step for which this rank had a batch

  AccumulatedGradients accumulated_;
  GradientDelivery delivery_;
  std::optional<ConsumedGradients> consumed_;  // with a consumer
  BackwardTracker tracker_;                    // last member: it calls this object
};

}  // namespace shoal
