#pragma once
// When things happen in a backward: gradients arrive, buckets fill, collectives leave in a fixed order, means come
// back.

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/gradients/earlier_sums.h"
#include "engine/gradients/gradient_hooks.h"
#include "engine/gradients/spent_gradients.h"
#include "engine/reducer/exchange.h"
#include "engine/reducer/gradient_consumer.h"
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
  size_t buckets_in_flight = 4;  // of those whose memory is needed only until they are summed up
  // How long to wait at most for one of them to come back before another leaves; none: until it does. For ranks that do
  // other things together during backward: one that used other parameters may need this rank first.
  std::optional<std::chrono::milliseconds> patience{};
  std::shared_ptr<GradientConsumer> consumer{};  // uses the means up; with an exchange whose sums are used up
  std::string name_of_consumer{};                // for errors
  std::shared_ptr<Timers> timers{};  // measure as "grads-reduce-scatter" what backward does not hide of the reduction
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
class Reducer {
 public:
  Reducer(std::vector<Gradient> gradients, const Group& group, const ReducerOptions& options,
          std::unique_ptr<Exchange> exchange);
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  // Whether the next backward synchronises (asked when its first gradient arrives).
  std::function<bool()> synchronises = [] { return true; };
  // Whether the sums of the next backward that synchronises are held back: not added up across the smaller groups of
  // an exchange in two stages, nor delivered, but added to those of the next one that is not held back. A step of its
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

  // Throws what the last step left to say: UsageError for parameters that no rank used. Same on all ranks.
  void check_last_step();
  // Looks at the graph of a forward that will be synchronised.
  void inspect(const std::vector<at::Tensor>& outputs);
  // A backward of a loss that is a sum over `weight`; see DistributedDataParallel::backward.
  void backward(const at::Tensor& loss_sum, double weight);

  // Sums are gone, as after zero_grad().
  void drop_sums() { earlier_.drop_all(); }
  // Between steps, before an optimizer looks at the sums (Bucket::kept): what has been done to grad() counts, and a
  // gradient that was set there is the sum. UsageError, on behalf of `who`, for gradients that ranks have not summed
  // up.
  void prepare_sums(const std::string& who);
  // Whether there is a sum, after prepare_sums(); false: no rank has used the gradient, or it was dropped.
  bool has_sum(size_t gradient) const { return earlier_.has_part(gradient); }
  // See EarlierSums.
  void spoil_sums(std::string why, bool add_only = false) { earlier_.spoil(std::move(why), add_only); }
  void require_addable_sums() const { earlier_.require_addable(); }
  // This rank has entered a step that its peers will finish or wait for; if it does not, abandon() must follow.
  // Collective once, after the first finished step: buckets are rebuilt.
  void expect_backward();
  // Something failed: the step cannot be finished here. No fault of a step that no forward has entered.
  void mark_failed() { failed_ = expected_ || phase_ == Phase::running; }
  // True when a step was begun here and neither finished nor abandoned.
  bool broken() const { return failed_ || phase_ == Phase::running; }
  // Synchronises what local backwards have left, without a backward. Collective.
  void reduce_now();
  // In two halves, for reducers whose buckets leave in turns: all buckets; the rest.
  void begin_now();
  void end_now();
  // Who has a batch from now on; nothing: everybody has.
  void attend(const std::optional<Attendance>& attendance);
  const std::optional<Attendance>& attendance() const { return attendance_; }
  // The lowest rank that has one.
  int lead() const { return attendance_ ? attendance_->first : 0; }
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
  bool used_here(size_t gradient) const { return used_[gradient]; }
  // What local backwards have left of it, in its place in the bucket, where it may be changed before reduce_now(). Zeros
  // where there is nothing; either way it counts as used from now on.
  at::Tensor local_gradient(size_t gradient);
  // Whether a backward that synchronises has begun and not ended.
  bool running() const { return phase_ == Phase::running; }
  // The wrapper has gone, and with it what its callbacks use: backwards are the caller's own from now on. What has been
  // summed up stays for an optimizer that outlives it.
  void detach();
  // UsageError where a backward after that has left a gradient.
  void require_seen_gradients() const;

  std::vector<std::vector<std::string>> bucket_names() const;
  int64_t step() const { return step_; }
  // Takes the place of one that has made so many steps.
  void count_from(int64_t step) {
    step_ = step;
    used_anywhere_.assign(gradients_.size(), true);  // as far as is known
  }
  const Group& group() const { return group_; }
  const std::vector<Gradient>& gradients() const { return gradients_; }
  const std::vector<Bucket>& buckets() const { return buckets_; }
  const Exchange& exchange() const { return *exchange_; }
  std::vector<at::Tensor> parameters_of(const Bucket& bucket) const;
  // What each of the first `ranks` ranks keeps of a bucket.
  std::vector<Range> owners_of(const Bucket& bucket, int ranks) const;
  // The order in which gradients arrived in the first finished step, which buckets follow from the next one on; `from`:
  // the rank whose order counts. None: nothing has been learnt, or buckets follow no order.
  struct LearntOrder {
    std::vector<size_t> order;
    int from = 0;
  };
  std::optional<LearntOrder> learnt_order() const;
  // Between steps: as if it had been learnt here, or nothing had. The same on all ranks, like a step.
  void go_on_from(const std::optional<LearntOrder>& learnt);

  // Gradients that do not come until further notice, the same on all ranks: of frozen parameters. Buckets of theirs
  // alone rest: they do not travel, and what lies in them stays. Between steps.
  void set_frozen(std::vector<bool> frozen);
  // Between steps, for a reducer that takes this one's place: sums that were left, and micro-batches' gradients that
  // have come since. By parameter.
  struct Left {
    struct Sum {
      EarlierSums::Left sum{};
      bool used = false;
    };
    std::unordered_map<const c10::TensorImpl*, Sum> gradients{};
    std::optional<double> weight{};
  };
  Left left();
  void resume(const Left& left);
  // Reduces gradients that lie in grad() and have not been reduced: what backwards under no_sync have left, what the
  // caller has set. A step of its own. Collective.
  void reduce_pending();
  // Whether a gradient has come on this rank that has not been reduced yet.
  bool has_local(size_t gradient) const { return used_[gradient] && gradients_[gradient].parameter.grad().defined(); }

  // For logging, see LoggingData.
  StepClock& clock() { return clock_; }
  const StepClock& clock() const { return clock_; }
  const std::vector<int64_t>& first_bucket_bytes() const { return first_bucket_bytes_; }
  std::vector<int64_t> bucket_bytes() const;
  bool rebuilt() const { return rebuilt_; }
  std::vector<size_t> unused() const;  // gradients that no rank used in the last step

 private:
  enum class Phase { idle, local, running };

  // reducer.cpp: gradients arrive
  void watch_backward();
  void arriving(size_t gradient);
  void arrived(size_t gradient);
  void begin_backward();
  void adopt_changes();
  void begin_step();
  void adopt_into_bucket(size_t gradient);
  void hand_over(size_t gradient);
  void count_arrival(size_t gradient);
  void mark_ready(size_t gradient);
  void mark_rest_ready();
  void mark_frozen_ready();
  bool rests(size_t bucket) const;
  void mark_last();
  void issue_ready_buckets(bool last = false);
  void issue(size_t bucket);
  void issue_facts();
  double issued_weight() const;
  Label label(size_t bucket) const;
  void build(const std::vector<size_t>& order);
  void build_as_registered();

  // reducer_local.cpp: what local backwards have left
  void hide_local_gradients();

  // reducer_release.cpp: memory of buckets, and their consumer
  void release_finished(bool all = false);
  void release(size_t bucket);
  void drop_gradients(size_t bucket);
  bool comes_in_time(Work& work);
  bool knows_means_early() const;
  void take_early(size_t bucket);
  void take_all();
  void take(size_t bucket);
  void leave_spent();

  // reducer_held.cpp: sums that are held back
  PendingExchange with_held(size_t bucket, PendingExchange sum);
  void hold_back();
  void require_complete_sums() const;

  // reducer_step.cpp: the end of a step
  void end_backward();
  void finish_step();
  double wait_for_buckets();
  std::vector<PendingExchange> advance(std::vector<PendingExchange>& sums);
  std::string who_failed();
  void deliver_all(double weight);
  void deliver(size_t bucket, double weight);
  void deliver_whole(size_t bucket);
  void leave_parts(size_t bucket);
  void deliver_sparse(size_t bucket);
  void learn();
  void close_step();
  void close_abandoned_step();
  void unmark_local_gradients();
  void adopt_arrival_order();
  void check_static_graph() const;

  std::vector<Gradient> gradients_;
  Group group_;
  std::string whose_;  // of the group's reducers, for labels
  ReducerOptions options_;
  std::unique_ptr<Exchange> exchange_;

  std::vector<Bucket> buckets_;
  Facts facts_;                // where they do not ride in the buckets: of all gradients
  std::vector<Place> places_;  // of each gradient
  SpareMemory spare_;
  bool keeps_passing_ = false;

  // One backward thread per device may report gradients.
  std::recursive_mutex mutex_;
  Phase phase_ = Phase::idle;
  std::weak_ptr<void> under_way_;  // the outermost backward that was seen to begin, while it runs
  bool expected_ = false;
  bool failed_ = false;
  int64_t step_ = 0;

  std::vector<bool> frozen_;  // by gradient

  // The step in progress.
  std::vector<bool> used_;     // a gradient was added in this step, local backwards included
  std::vector<bool> came_;     // backward reached it, if only with an undefined gradient
  std::vector<bool> reached_;  // find_unused_parameters: in some forward's graph
  bool inspected_ = false;
  std::vector<bool> ready_;      // handed to its bucket
  std::vector<int> arrivals_;    // times a gradient came in this backward
  std::vector<size_t> missing_;  // per bucket: gradients not ready
  size_t next_ = 0;              // bucket to issue next
  std::vector<PendingExchange> sums_;
  size_t finished_ = 0;  // buckets whose memory this rank has given up
  bool early_ = false;   // the consumer takes buckets while backward runs
  bool void_ = false;    // one that it was to take was abandoned
  Work facts_work_;
  std::vector<at::Tensor> kept_;  // gradients that this rank did not touch, in case nobody did
  std::vector<std::optional<SparseSum>> sparse_;
  std::optional<double> weight_;
  bool weighted_backward_ = false;
  bool in_backward_ = false;  // not reduce_now
  bool holding_ = false;      // its sums are held back
  bool by_hand_ = false;      // reduce_pending(): tells nothing of what other steps use, and in what order
  std::optional<Attendance> attendance_;
  int64_t attended_step_ = -1;  // the last step for which this rank had a batch

  // The last step.
  std::vector<bool> used_anywhere_;
  std::vector<bool> came_anywhere_;
  bool alike_ = true;    // in the last step all ranks used the same gradients, as far as is known
  bool patient_ = true;  // in this step no bucket was waited for in vain
  EarlierSums earlier_;
  std::optional<SpentGradients> spent_;  // with a consumer
  bool local_ = false;                   // gradients are marked as such (local_gradients.h)

  // Learnt from the first finished step.
  std::vector<size_t> order_;
  int order_from_ = 0;                  // the rank whose order counts
  std::vector<int> expected_arrivals_;  // empty: no backward here yet
  bool learnt_ = false;
  bool rebuild_due_ = false;
  bool rebuilt_ = false;
  std::vector<std::string> unused_names_;

  StepClock clock_;
  std::vector<int64_t> first_bucket_bytes_;

  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);  // hooks on outputs may outlive this object
  std::exception_ptr hook_error_;  // what a communication hook has thrown while its step ended
  // Last: its callbacks use all of the above. None once the wrapper has gone.
  std::optional<GradientHooks> hooks_;
};

}  // namespace shoal
