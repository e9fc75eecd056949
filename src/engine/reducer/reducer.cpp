// First half of a step: gradients arrive, buckets fill and are issued.

#include "engine/reducer/reducer.h"

#include <fmt/format.h>
#include <torch/utils.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "comm/group/coalesce.h"
#include "comm/group/group_state.h"
#include "shoal/error.h"

namespace shoal {
namespace {

std::vector<Gradient> checked(std::vector<Gradient> gradients) {
  for (const auto& gradient : gradients) {
    if (gradient.parameter.is_complex()) {
      throw UsageError(
          fmt::format("parameter {} is complex: no transport reduces complex numbers; hold it as a real tensor with a "
                      "last dimension of 2 (view_as_real)",
                      gradient.name));
    }
  }
  return gradients;
}

// Labels carry the model's number: otherwise two equal models, created in another order on another rank, would receive
// each other's gradients.
std::string whose(const Group& group) {
  const int number = ++state_of(group)->progress->reducers;
  return number == 1 ? "" : fmt::format("model {}'s ", number);
}

}  // namespace

Reducer::Reducer(std::vector<Gradient> gradients, const Group& group, const ReducerOptions& options,
                 std::unique_ptr<GradientReduction> reduction)
    : gradients_(checked(std::move(gradients))),
      group_(group),
      whose_(whose(group)),
      options_(options),
      reduction_(std::move(reduction)),
      buckets_(gradients_, group_, reduction_->plan()),
      order_(reduction_->plan().follows_order),
      last_(gradients_.size()),
      accumulated_(gradients_, buckets_,
                   {options.gradient_as_bucket_view, options.about_sums, reduction_->plan().everywhere()}),
      delivery_(gradients_, buckets_, group_, reduction_->plan(), accumulated_, options.leave_grad),
      tracker_(gradients_,
               {.find_unused_parameters = options.find_unused_parameters,
                .static_graph = options.static_graph,
                .open = reduction_->plan().everywhere() && !options.consumer,
                .apart = reduction_->hook() != nullptr && !reduction_->hook()->sums_over_all(group_),
                .splits = (options.find_unused_parameters || options.accept_unused) && !options.static_graph &&
                          !options.consumer},
               *this) {
  if (options_.consumer) {
    consumed_.emplace(gradients_, buckets_, *options_.consumer, options_.name_of_consumer, options_.about_sums);
  }
  build_as_registered();
}

Reducer::~Reducer() {
  forget_failed(*this);
}

// Reverse order of registration, because backward reaches the last layer first.
void Reducer::build_as_registered() {
  std::vector<size_t> order(gradients_.size());
  std::iota(order.rbegin(), order.rend(), 0);
  build(order);
}

void Reducer::build(const std::vector<size_t>& order) {
  const torch::NoGradGuard no_grad;
  accumulated_.move_to(buckets_.build(order));
}

void Reducer::expect_backward() {
  if (!last_.apart.empty()) throw UsageError(last_.apart);
  if (order_.due()) {  // here rather than in backward, when activations take memory as well
    adopt_changes();
    build(order_.agree(group_, gradients_.size(), steps_));
  }
  if (!entry_.expected) tracker_.forget_left_open();  // that was a backward of before this step
  entry_.expected = buckets_.any_trainable();
  entry_.holding = callbacks.holds_back();
}

void Reducer::arriving(size_t gradient) {
  const TimedScope scope(timeline_of(group_), "hook", steps_);
  accumulated_.note_arriving(gradient);
  if (may_scale_sum() || buckets_.of(gradient).sparse()) accumulated_.keep_mean(gradient);
  accumulated_.sums().set_aside(gradient);
}

void Reducer::arrived(size_t gradient) {
  const TimedScope scope(timeline_of(group_), "hook", steps_);
  accumulated_.note_arrival(gradient);
  running() ? count_arrival(gradient) : accumulated_.note_local(gradient);
}

// Reads what the caller did to gradients since the last backward.
void Reducer::adopt_changes() {
  if (running() && step_->given_up) return accumulated_.sums().adopt_changes();  // its buckets are still being summed
  if (consumed_) consumed_->clear();
  accumulated_.adopt_changes();
}

void Reducer::prepare_sums(const std::string& who) {
  const auto lock = tracker_.lock();
  const torch::NoGradGuard no_grad;
  adopt_changes();
  accumulated_.prepare_sums(who, callbacks.before_writing);
}

void Reducer::require_none_local(const std::string& who) {
  const auto lock = tracker_.lock();
  const torch::NoGradGuard no_grad;
  adopt_changes();
  accumulated_.require_none_local(who);
}

void Reducer::begin_backward() {
  check_last_step();
  callbacks.before_backward();
  callbacks.before_writing();
  const bool weighted = weighing_ != Weighing::none;
  if (!weighted) adopt_changes();
  const bool in_backward = BackwardTracker::in_backward();
  const bool by_other = !weighted && accumulated_.add_others_weight();
  if (accumulated_.weight() && !weighted && !by_other && in_backward) {
    throw UsageError(
        "this step has backwards with and without a weight: pass a weight to all of its micro-batches, or to none");
  }
  if (callbacks.synchronises()) {
    begin_step(in_backward ? Step::From::backward : Step::From::no_batch);
  } else {
    tracker_.enter(BackwardTracker::Phase::local);
  }
}

void Reducer::begin_step(Step::From from) {
  if (order_.due()) build(order_.agree(group_, gradients_.size(), steps_));
  if (from == Step::From::backward) clock_.mark(StepClock::backward_begins, steps_);
  const bool early = consumed_ && consumed_->come_early();
  tracker_.enter(BackwardTracker::Phase::running);
  step_.emplace(from, buckets_, options_.limits, last_.same_on_all);
  step_->early = early;
  // A step that failed in forward keeps its mode, because its peers do.
  if (!entry_.failed) entry_.holding = callbacks.holds_back();
  for (size_t i = 0; i < gradients_.size(); ++i) {
    // A frozen gradient in a bucket with others contributes zeros.
    if (buckets_.frozen(i) && !buckets_.all_frozen(buckets_.places()[i].bucket)) mark_ready(i);
  }
  for (const auto gradient : tracker_.take_unreached()) {
    const bool rests = buckets_.all_frozen(buckets_.places()[gradient].bucket);
    if (!rests && !step_->schedule.is_ready(gradient)) mark_ready(gradient);
  }
}

void Reducer::count_arrival(size_t gradient) {
  const auto& name = gradients_[gradient].name;
  if (buckets_.frozen(gradient)) {
    throw UsageError(
        fmt::format("backward computed a gradient for {}, which was frozen in the wrapper's last forward: unfreeze it "
                    "before that forward, or call refresh_trainable()",
                    name));
  }
  if (!tracker_.count(gradient)) return;
  if (step_->schedule.is_ready(gradient)) refuse_again(gradient);
  mark_ready(gradient);
}

void Reducer::refuse_again(size_t gradient) const {
  const auto& name = gradients_[gradient].name;
  if (tracker_.arrivals()[gradient] == 1) {
    throw UsageError(fmt::format(
        "backward computed the gradient of {}, which the graph behind the outputs of forward does not reach, after its "
        "reduction had begun: unset find_unused_parameters, if a block is recomputed by a backward of its own or the "
        "loss depends on more than the outputs; where forward returns a type of your own, specialise "
        "shoal::OutputTensors for it, which finds its tensors (in Python, return them in a list, a dict or a "
        "dataclass)",
        name));
  }
  const std::string static_graph = "set static_graph and unset find_unused_parameters";
  throw UsageError(fmt::format(
      "backward computed the gradient of {} again after its reduction had begun, as it does for a block that "
      "is used several times and recomputed by a backward of its own: {} (in Python, or checkpoint with "
      "use_reentrant=False)",
      name, options_.about_repeats.empty() ? static_graph : options_.about_repeats));
}

void Reducer::mark_ready(size_t gradient) {
  if (!buckets_.of(gradient).sparse()) {
    reuse_memory(gradient);
    if (callbacks.after_sum) release_finished();
    const TimedScope scope(timeline_of(group_), "copy", steps_);
    step_->untouched[gradient] = accumulated_.hand_over(gradient, scale());
  }
  step_->schedule.mark_ready(gradient);
  issue_ready_buckets();
}

// In the order of issue, so that transient buckets need not all exist at once.
void Reducer::mark_rest_ready() {
  for (size_t i = 0; i < buckets_.size(); ++i) {
    if (buckets_.all_frozen(i)) continue;
    for (const auto member : buckets_[i].members()) {
      if (!step_->schedule.is_ready(member)) mark_ready(member);
    }
  }
  issue_ready_buckets(/*last=*/true);
}

void Reducer::issue_ready_buckets(bool last) {
  auto& schedule = step_->schedule;
  // First what waits in another wrapper, so that the order of buckets is that in which they became full.
  if (const auto waiting = std::exchange(state_of(group_)->progress->waiting_bucket, {}).lock()) (*waiting)();
  while (schedule.next_is_full() && callbacks.may_leave(last)) {
    if (!last && waits_for_end(schedule.next())) return;
    if (!buckets_.all_frozen(schedule.next())) issue(schedule.next());
    schedule.pass_next();
    release_finished();
  }
}

// The last bucket leaves at the end of backward, because only it can say that the rest of the backward has failed,
// unless a trailer follows it. That rest has no gradient of this reducer.
bool Reducer::waits_for_end(size_t bucket) {
  if (buckets_.trailer().defined() || !buckets_.is_last(bucket) || !BackwardTracker::in_backward()) return false;
  step_->issues_last = std::make_shared<std::function<void()>>([this] { issue_ready_buckets(/*last=*/true); });
  state_of(group_)->progress->waiting_bucket = step_->issues_last;
  return true;
}

double Reducer::issued_weight() const {
  if (entry_.failed || last_.missed) return std::numeric_limits<double>::quiet_NaN();
  if (accumulated_.weight()) return *accumulated_.weight();
  if (!join_state_) return 1.0;
  // Under no_sync a rank may have had a batch earlier in the same step.
  if (!join_state_->by_initial_size) return join_state_->here || attended_step_ == steps_ ? 1.0 : 0.0;
  // The first rank counts for absent ranks as well, because those cannot know whether the others use weights.
  if (join_state_->first == group_.rank()) return 1.0 + join_state_->absent;
  return join_state_->here ? 1.0 : 0.0;
}

double Reducer::scale() const {
  const double equal = 1.0 / group_.size();
  return accumulated_.weight() ? equal : callbacks.share().value_or(equal);
}

Label Reducer::label(size_t index) const {
  return {steps_, static_cast<int64_t>(index), whose_ + buckets_[index].names()};
}

void Reducer::issue(size_t index) {
  if (index == 0) clock_.mark(StepClock::first_leaves, steps_);
  auto& bucket = buckets_[index];
  if (bucket.sparse()) {
    const auto member = bucket.members().front();
    const auto& parameter = gradients_[member].parameter;
    auto grad = accumulated_.used()[member] && !entry_.failed ? parameter.grad() : at::Tensor();
    const double factor = scale() * group_.size();  // sparse sums are divided by the number of ranks
    if (grad.defined() && std::abs(factor - 1) > 1e-12) grad = grad * factor;
    step_->sparse[index] = all_reduce_sparse(group_, grad, parameter.sizes(), parameter.options().requires_grad(false),
                                             issued_weight(), label(index));
  } else {
    if (bucket.trailer().defined()) write(bucket.trailer());
    auto sum = with_held(index, reduction_->reduce(bucket, label(index)));
    if (callbacks.after_sum) sum = callbacks.after_sum(std::move(sum), index, label(index));
    step_->schedule.set_sum(index, std::move(sum));
  }
}

void Reducer::write(StepTrailer& trailer) const {
  using Forwards = StepTrailer::Forwards;
  auto forwards = Forwards::unknown;
  if (step_->from == Step::From::backward) {
    forwards = has_dropped_forward()           ? Forwards::dropped
               : entry_.forwards.all_reached() ? Forwards::used
                                               : Forwards::unknown;
  }
  trailer.write(accumulated_.used(), accumulated_.came(), forwards, issued_weight());
}

void Reducer::issue_trailer() {
  if (!buckets_.trailer().defined()) return;
  write(buckets_.trailer());
  step_->trailer_work =
      group_.all_reduce(buckets_.trailer().memory(), ReduceOp::sum, {steps_, -1, whose_ + "used gradients and weight"});
}

}  // namespace shoal
