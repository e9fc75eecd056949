// The first half of a step: gradients arrive, buckets fill and leave.

#include "engine/reducer/reducer.h"

#include <fmt/format.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/utils.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "comm/group/group_state.h"
#include "engine/gradients/graph_walk.h"
#include "engine/gradients/local_gradients.h"
#include "memory/views.h"
#include "shoal/error.h"

namespace shoal {
namespace {

std::vector<at::Tensor> checked_parameters(const std::vector<Gradient>& gradients) {
  std::vector<at::Tensor> parameters;
  for (const auto& gradient : gradients) {
    if (gradient.parameter.is_complex()) {
      throw UsageError(
          fmt::format("parameter {} is complex: no transport reduces complex numbers; hold it as a real "
                      "tensor with a last dimension of 2 (view_as_real)",
                      gradient.name));
    }
    parameters.push_back(gradient.parameter);
  }
  return parameters;
}

// Two equal models in another order on another rank would take each other's gradients: labels are compared.
std::string whose(const Group& group) {
  const int number = ++state_of(group)->progress->reducers;
  return number == 1 ? "" : fmt::format("model {}'s ", number);
}

}  // namespace

Reducer::Reducer(std::vector<Gradient> gradients, const Group& group, const ReducerOptions& options,
                 std::unique_ptr<Exchange> exchange)
    : gradients_(std::move(gradients)),
      group_(group),
      whose_(whose(group)),
      options_(options),
      exchange_(std::move(exchange)),
      frozen_(gradients_.size()),
      used_(gradients_.size()),
      came_(gradients_.size()),
      reached_(gradients_.size()),
      used_anywhere_(gradients_.size()),
      came_anywhere_(gradients_.size()),
      earlier_(gradients_, buckets_, places_, options.about_sums),
      hooks_(
          std::in_place, checked_parameters(gradients_), [this](size_t gradient) { arrived(gradient); },
          [this](size_t gradient) { arriving(gradient); }) {
  if (options_.consumer) spent_.emplace(gradients_, options_.name_of_consumer, options_.about_sums);
  build_as_registered();
}

Reducer::~Reducer() {
  unmark_local_gradients();
}

// Backward meets the last registered layer first.
void Reducer::build_as_registered() {
  std::vector<size_t> order(gradients_.size());
  std::iota(order.rbegin(), order.rend(), 0);
  build(order);
  first_bucket_bytes_ = bucket_bytes();
}

void Reducer::build(const std::vector<size_t>& order) {
  const torch::NoGradGuard no_grad;
  const auto plan = exchange_->plan(gradients_, order);
  auto old = std::move(buckets_);
  buckets_.clear();
  // Kept while gradients that lie in it move; usually none do, and then old and new never exist together.
  std::erase_if(old, [this](Bucket& bucket) {
    return std::none_of(gradients_.begin(), gradients_.end(), [&](const Gradient& gradient) {
      return same_storage(gradient.parameter.grad(), bucket.flat());
    });
  });
  places_.assign(gradients_.size(), {});
  const bool apart = facts_apart(gradients_, exchange_->carries_facts());
  for (const auto& members : plan) {
    for (size_t index = 0; index < members.size(); ++index) places_[members[index]] = {buckets_.size(), index};
    buckets_.emplace_back(gradients_, members, group_, *exchange_, !apart);
  }
  mark_last();
  // Getting shared memory from the system and giving it back takes about as long as a small model's whole step.
  constexpr int64_t small_bytes = 8 << 20;
  int64_t passing_bytes = 0;
  for (const auto& bucket : buckets_) passing_bytes += bucket.passes() ? bucket.layout().bytes() : 0;
  keeps_passing_ = passing_bytes <= small_bytes;
  if (apart) {
    std::vector<size_t> all(gradients_.size());
    std::iota(all.begin(), all.end(), 0);
    facts_ = Facts(all, group_.allocate(Facts::numel(all.size()), at::TensorOptions(at::kFloat)));
  }
  earlier_.start();
  if (!options_.gradient_as_bucket_view) return;
  for (size_t i = 0; i < gradients_.size(); ++i) {
    if (gradients_[i].parameter.grad().defined()) adopt_into_bucket(i);
  }
}

void Reducer::expect_backward() {
  // Here rather than in backward, where activations are in memory as well.
  if (rebuild_due_) {
    adopt_changes();
    adopt_arrival_order();
  }
  expected_ = std::find(frozen_.begin(), frozen_.end(), false) != frozen_.end();
  holding_ = holds_back();
}

void Reducer::inspect(const std::vector<at::Tensor>& outputs) {
  if (options_.find_unused_parameters) {
    mark_reachable(outputs, hooks_->numbers(), reached_);
    inspected_ = true;
  }
  // A block that is recomputed runs a backward of its own inside the outer one. Only the outer one's end is the step's,
  // and an output's gradient is the first thing that it computes.
  for (const auto& output : outputs) {
    if (!output.requires_grad() || output.is_leaf()) continue;
    output.register_hook([this, alive = std::weak_ptr<bool>(alive_)](const at::Tensor&) {
      if (alive.expired()) return;
      const std::lock_guard lock(mutex_);
      watch_backward();
    });
  }
}

// Its end ends the step, if it has begun by then: torch::autograd::grad reaches no parameter. Goes with the backward,
// whether that ends well or not.
void Reducer::watch_backward() {
  if (!under_way_.expired()) return;
  const auto token = std::make_shared<int>();
  under_way_ = token;
  torch::autograd::Engine::get_default_engine().queue_callback([this, token] { end_backward(); });
}

// Before anything is accumulated, so that what earlier backwards have left can be told from what this one adds.
void Reducer::arriving(size_t gradient) {
  const std::lock_guard lock(mutex_);
  const torch::NoGradGuard no_grad;
  const bool stale = phase_ == Phase::local && under_way_.expired();
  if (phase_ == Phase::idle || stale) begin_backward();
  earlier_.set_aside(gradient);
}

void Reducer::arrived(size_t gradient) {
  const std::lock_guard lock(mutex_);
  const torch::NoGradGuard no_grad;
  came_[gradient] = true;
  if (gradients_[gradient].parameter.grad().defined()) used_[gradient] = true;
  if (phase_ == Phase::running) {
    count_arrival(gradient);
    return;
  }
  if (options_.gradient_as_bucket_view || gradients_[gradient].travels_as) adopt_into_bucket(gradient);
  earlier_.added(gradient);
  local_ = true;
  if (gradients_[gradient].parameter.grad().defined()) mark_local(gradients_[gradient].parameter);
}

// What has become of gradients since the last backward: those that were dropped are not of the next step.
void Reducer::adopt_changes() {
  if (spent_) spent_->clear();
  earlier_.adopt_changes();
  bool some = false, left = false;
  for (size_t i = 0; i < gradients_.size(); ++i) {
    some = some || used_[i];
    used_[i] = used_[i] && gradients_[i].parameter.grad().defined();
    left = left || used_[i];
  }
  if (some && !left) weight_.reset();
}

void Reducer::prepare_sums(const std::string& who) {
  const std::lock_guard lock(mutex_);
  const torch::NoGradGuard no_grad;
  adopt_changes();
  require_complete_sums();
  earlier_.require_usable();
  for (size_t i = 0; i < gradients_.size() && local_; ++i) {
    require_no_local_gradient(gradients_[i].parameter, who, gradients_[i].name);
  }
  if (earlier_.unsettled()) {
    before_writing();
    earlier_.put_back();
    earlier_.write_zeroes();
  }
  for (size_t i = 0; i < gradients_.size(); ++i) {
    if (has_sum(i) || !gradients_[i].parameter.grad().defined()) continue;
    before_writing();
    earlier_.require_addable();
    earlier_.adopt(i);
  }
}

void Reducer::begin_backward() {
  check_last_step();
  before_writing();
  if (!weighted_backward_) adopt_changes();
  in_backward_ = torch::autograd::get_current_graph_task_id() >= 0;
  if (weight_ && !weighted_backward_ && in_backward_) {
    throw UsageError("a backward with a weight and one without in the same step: use either one for all micro-batches");
  }
  if (synchronises()) {
    begin_step();
  } else {
    phase_ = Phase::local;
  }
  if (in_backward_) watch_backward();  // else a rank without samples
}

void Reducer::begin_step() {
  if (rebuild_due_) adopt_arrival_order();
  if (in_backward_) clock_.mark(StepClock::backward_begins, step_);
  early_ = options_.consumer && !options_.consumer->needs_all() && knows_means_early();
  phase_ = Phase::running;
  if (!failed_) holding_ = holds_back();  // one that failed before does what its peers do
  patient_ = alike_;
  next_ = 0;
  finished_ = 0;
  void_ = false;
  if (early_) used_anywhere_.assign(gradients_.size(), false);
  came_anywhere_.assign(gradients_.size(), false);
  facts_work_ = {};
  ready_.assign(gradients_.size(), false);
  arrivals_.assign(gradients_.size(), 0);
  kept_.assign(gradients_.size(), {});
  sums_.clear();
  sums_.resize(buckets_.size());
  sparse_.assign(buckets_.size(), std::nullopt);
  missing_.clear();
  for (const auto& bucket : buckets_) missing_.push_back(bucket.members().size());
  mark_frozen_ready();
  if (!inspected_ || options_.static_graph) return;
  for (size_t i = 0; i < gradients_.size(); ++i) {
    if (!reached_[i] && !ready_[i]) mark_ready(i);
  }
}

void Reducer::count_arrival(size_t gradient) {
  const auto& name = gradients_[gradient].name;
  if (frozen_[gradient]) {
    throw UsageError(
        fmt::format("the gradient of {} came, which was frozen in the last forward of the wrapper: unfreeze it before "
                    "that forward, or call refresh_trainable()",
                    name));
  }
  if (!learnt_ && arrivals_[gradient] == 0) order_.push_back(gradient);
  ++arrivals_[gradient];
  if (options_.static_graph) {
    if (expected_arrivals_.empty()) return;  // all leave at the end of the first backward
    if (arrivals_[gradient] > expected_arrivals_[gradient]) {
      throw UsageError(
          fmt::format("static_graph: the gradient of {} came {} times, in the first step {} times: the "
                      "graph has changed",
                      name, arrivals_[gradient], expected_arrivals_[gradient]));
    }
    if (arrivals_[gradient] < expected_arrivals_[gradient]) return;
  } else if (ready_[gradient]) {
    throw UsageError(
        fmt::format("the gradient of {} came after it had been handed over for reduction. If a block is "
                    "recomputed in backward, set static_graph and unset find_unused_parameters; if a loss does not "
                    "come from the outputs of forward, unset find_unused_parameters",
                    name));
  }
  mark_ready(gradient);
}

void Reducer::mark_ready(size_t gradient) {
  ready_[gradient] = true;
  if (!buckets_[places_[gradient].bucket].sparse()) hand_over(gradient);
  --missing_[places_[gradient].bucket];
  issue_ready_buckets();
}

// In the order in which buckets leave, so that those which pass through need not all exist at once.
void Reducer::mark_rest_ready() {
  for (size_t i = 0; i < buckets_.size(); ++i) {
    if (rests(i)) continue;
    for (const auto member : buckets_[i].members()) {
      if (!ready_[member]) mark_ready(member);
    }
  }
  issue_ready_buckets(/*last=*/true);
}

// Local accumulation happens in the bucket as well, so that gradients exist once.
void Reducer::adopt_into_bucket(size_t gradient) {
  auto& bucket = buckets_[places_[gradient].bucket];
  auto& grad = gradients_[gradient].parameter.mutable_grad();
  if (bucket.sparse() || !grad.defined() || earlier_.stands_in(gradient)) return;
  bucket.acquire(group_, spare_);
  const auto& view = bucket.view(places_[gradient].index);
  if (same_view(grad, view)) return;
  view.copy_(grad.is_sparse() ? grad.to_dense() : grad.detach());
  grad = view;
}

// Puts this rank's part of the mean into the bucket.
void Reducer::hand_over(size_t gradient) {
  auto& bucket = buckets_[places_[gradient].bucket];
  bucket.acquire(group_, spare_);
  const auto& view = bucket.view(places_[gradient].index);
  auto& grad = gradients_[gradient].parameter.mutable_grad();
  const double scale = 1.0 / group_.size();
  earlier_.set_aside(gradient);
  if (!grad.defined()) {
    view.zero_();
    return;
  }
  if (same_view(grad, view)) {
    if (!used_[gradient]) kept_[gradient] = view.clone();
    if (group_.size() > 1) at::Tensor(view).mul_(scale);
    return;
  }
  const auto dense = grad.is_sparse() ? grad.to_dense() : grad.detach();
  if (group_.size() > 1 && dense.scalar_type() == view.scalar_type()) {
    auto out = view;
    at::mul_out(out, dense, at::scalar_tensor(scale, dense.options().dtype(at::kDouble)));
  } else {
    at::Tensor(view).copy_(dense).mul_(scale);
  }
  if (options_.gradient_as_bucket_view && used_[gradient]) grad = view;
}

void Reducer::issue_ready_buckets(bool last) {
  while (next_ < buckets_.size() && missing_[next_] == 0 && may_leave(last)) {
    if (!rests(next_)) issue(next_);
    ++next_;
    release_finished();
  }
}

double Reducer::issued_weight() const {
  if (failed_) return std::numeric_limits<double>::quiet_NaN();
  if (weight_) return *weight_;
  if (!attendance_) return 1.0;
  // Under no_sync a rank may have had a batch before, for the same step.
  if (!attendance_->by_initial_size) return attendance_->here || attended_step_ == step_ ? 1.0 : 0.0;
  // The first one counts for those that are absent, who cannot know whether the others use weights.
  if (attendance_->first == group_.rank()) return 1.0 + attendance_->absent;
  return attendance_->here ? 1.0 : 0.0;
}

Label Reducer::label(size_t index) const {
  return {step_, static_cast<int64_t>(index), whose_ + buckets_[index].names()};
}

void Reducer::issue(size_t index) {
  if (index == 0) clock_.mark(StepClock::first_leaves, step_);
  auto& bucket = buckets_[index];
  if (bucket.sparse()) {
    const auto member = bucket.members().front();
    const auto& parameter = gradients_[member].parameter;
    const auto grad = used_[member] && !failed_ ? parameter.grad() : at::Tensor();
    sparse_[index] = all_reduce_sparse(group_, grad, parameter.sizes(), parameter.options().requires_grad(false),
                                       issued_weight(), label(index));
  } else {
    if (bucket.facts().defined()) bucket.facts().write(used_, came_, issued_weight());
    sums_[index] = with_held(index, exchange_->reduce(bucket, label(index)));
  }
}

void Reducer::issue_facts() {
  if (!facts_.defined()) return;
  facts_.write(used_, came_, issued_weight());
  facts_work_ = group_.all_reduce(facts_.memory(), ReduceOp::sum, {step_, -1, whose_ + "used gradients and weight"});
}

}  // namespace shoal
