#include "engine/gradients/backward_tracker.h"

#include <fmt/format.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/utils.h>

#include <atomic>
#include <exception>
#include <map>

#include "base/called_by_pytorch.h"
#include "engine/gradients/graph_walk.h"
#include "shoal/error.h"

namespace shoal {
namespace {

std::vector<at::Tensor> parameters_of(const std::vector<Gradient>& gradients) {
  std::vector<at::Tensor> parameters;
  for (const auto& gradient : gradients) parameters.push_back(gradient.parameter);
  return parameters;
}

// Backwards by autograd's number, each with its watches.
struct Watched {
  std::atomic<int64_t> so_far = 0;
  std::mutex mutex;
  std::map<int, int> watches;

  int add(int backward, int more) {
    const std::lock_guard lock(mutex);
    const int now = watches[backward] += more;
    if (now == 0) watches.erase(backward);
    return now;
  }
};

Watched& watched() {
  static auto* one = new Watched;  // never destroyed: a backward may outlive static objects
  return *one;
}

// With torch::autograd::grad, parameters get no gradient.
void require_wrapper(bool detached, const std::string& parameter) {
  const auto* chosen = torch::autograd::get_current_graph_task_exec_info();
  if (!detached || (chosen != nullptr && !chosen->empty())) return;
  throw UsageError(fmt::format(
      "backward of a forward whose wrapper is gone by now, has been unwrapped, or has changed its ranks since: "
      "gradients, such as that of {}, would stay those of this rank alone. Keep the wrapper, as it is, until "
      "backward has ended",
      parameter));
}

}  // namespace

// Watches a backward from one of its final callbacks, which autograd keeps until that backward is over, whether it
// succeeds or throws. A backward that a node of another one has run (a recomputed block) is destroyed within that node:
// there, the watch passes to the outer one. libtorch exports no depth of a backward.
class BackwardTracker::Watch {
 public:
  Watch(BackwardTracker& tracker, Until until)
      : tracker_(tracker),
        until_(until),
        number_(++tracker.watches_),
        place_{torch::autograd::get_current_graph_task_id(), ++watched().so_far},
        alive_(tracker.alive_) {
    watched().add(place_.backward, 1);
  }
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;
  ~Watch() {
    watched().add(place_.backward, -1);
    if (over_ || alive_.expired()) return;
    const auto held = tracker_.lock();
    if (passes_ && in_backward()) {
      tracker_.follow(until_);
    } else if (std::uncaught_exceptions() > 0) {
      tracker_.failed(*this);  // the step stays open, and the next backward is refused
    }
    // Otherwise a device's thread destroys it late, where the program may be at work on the gradients: the next forward
    // ends the step.
  }
  // Called at the end of the backward. Whether the watch passes to an outer one, whose node is at work.
  bool passes() {
    passes_ = until_ == Until::outermost && torch::autograd::get_current_node();
    return passes_;
  }
  // Whether it is the only one of its backward.
  bool alone() const { return watched().add(place_.backward, 0) == 1; }
  // The backward has ended, without an exception.
  void finish() { over_ = true; }
  int64_t number() const { return number_; }
  const BackwardPlace& place() const { return place_; }

 private:
  BackwardTracker& tracker_;
  Until until_;
  int64_t number_;
  BackwardPlace place_;
  std::weak_ptr<bool> alive_;
  bool passes_ = false;
  bool over_ = false;
};

BackwardTracker::BackwardTracker(const std::vector<Gradient>& gradients, const Options& options,
                                 BackwardListener& listener)
    : gradients_(gradients),
      options_(options),
      listener_(listener),
      turns_(std::in_place, parameters_of(gradients), options.open, options.apart),
      passing_(gradients.size()),
      hooks_(
          std::in_place, parameters_of(gradients), [this](size_t gradient) { arrived(gradient); },
          [this](size_t gradient) { arriving(gradient); }) {}

bool BackwardTracker::in_backward() {
  return torch::autograd::get_current_graph_task_id() >= 0;
}

// On a GPU the watch of a backward that has failed may live on for a moment: a forward that trains ends that step.
bool BackwardTracker::under_way() {
  const auto held = lock();
  return !under_way_.expired() && (in_backward() || !torch::GradMode::is_enabled());
}

void BackwardTracker::note_forward() {
  if (turns_) turns_->forward();
}

void BackwardTracker::inspect(const std::vector<at::Tensor>& outputs, const std::shared_ptr<bool>& reached) {
  if (gradients_.empty()) return;
  if (options_.find_unused_parameters) {
    if (!reached_) reached_.emplace(gradients_.size());
    // No tensor: they lie in a type that nobody has specialised OutputTensors for, or in an argument.
    if (outputs.empty()) reached_->assign(gradients_.size(), true);
    mark_reachable(outputs, hooks_->numbers(), *reached_);
  }
  // A recomputed block runs a backward of its own inside the outer one. The step ends with the one that computes the
  // gradient of an output.
  for (const auto& output : outputs) {
    if (!output.requires_grad() || output.is_leaf()) continue;
    output.register_hook([this, reached, alive = std::weak_ptr<bool>(alive_), detached = detached_,
                          parameter = gradients_.front().name](const at::Tensor&) {
      if (reached) *reached = true;
      called_by_pytorch([&] {
        require_wrapper(*detached, parameter);
        if (alive.expired()) return;
        const auto held = lock();
        watch(Until::this_one);
      });
    });
  }
}

std::vector<size_t> BackwardTracker::take_unreached() {
  const auto reached = std::exchange(reached_, std::nullopt);
  std::vector<size_t> list;
  if (!reached || options_.static_graph) return list;
  for (size_t i = 0; i < reached->size(); ++i) {
    if (!(*reached)[i]) list.push_back(i);
  }
  return list;
}

// The end of the backward ends the step, if a parameter's gradient has begun one by then (torch::autograd::grad reaches
// none).
void BackwardTracker::watch(Until until) {
  if (!under_way_.expired()) return;
  require_no_failed_backward();
  recomputes_ = false;
  follow(until);
}

void BackwardTracker::follow(Until until) {
  const auto watch = std::make_shared<Watch>(*this, until);
  under_way_ = watch;
  left_open_ = true;
  queue(watch, EndStage::send);
}

void BackwardTracker::queue(const std::shared_ptr<Watch>& watch, EndStage stage) {
  torch::autograd::Engine::get_default_engine().queue_callback(
      [this, watch, stage] { called_by_pytorch([&] { ended(watch, stage); }); });
}

void BackwardTracker::ended(const std::shared_ptr<Watch>& watch, EndStage stage) {
  const auto held = lock();
  if (under_way_.lock() != watch) return watch->finish();  // another one of this backward has taken its place
  if (stage == EndStage::send && watch->passes()) {
    recomputes_ = true;
    return;
  }
  const bool waits =
      stage == EndStage::send ? listener_.ends_with_others() && !watch->alone() : stage == EndStage::await;
  if (waits && phase_ == Phase::running) {
    const torch::NoGradGuard no_grad;
    listener_.end_backward(stage);
    return queue(watch, stage == EndStage::send ? EndStage::await : EndStage::deliver);
  }
  end_from(stage);
  watch->finish();
}

// Autograd destroys the watch of a backward that has thrown before the caller gets the exception. With a device's
// thread it may be later, when another backward has begun.
void BackwardTracker::failed(const Watch& watch) noexcept {
  if (watch.number() != watches_ || phase_ == Phase::local) return;
  const torch::NoGradGuard no_grad;
  try {
    listener_.backward_failed(watch.place());
  } catch (...) {  // NOLINT(bugprone-empty-catch): what the backward has thrown says more
  }
}

void BackwardTracker::begin() {
  const auto held = lock();
  const torch::NoGradGuard no_grad;
  // A rank without samples begins its step outside of autograd.
  if (in_backward()) {
    watch(Until::outermost);
  } else {
    require_no_failed_backward();
  }
  require_own_forward();
  if (hooks_) hooks_->put_back();
  listener_.begin_backward();
}

void BackwardTracker::require_own_forward() const {
  if (!passed_by_ || passed_by_->first != torch::autograd::get_current_graph_task_id()) return;
  throw UsageError(
      fmt::format("parameter {} is in two wrappers, and a backward goes through the module of one that has run no "
                  "forward since the other's: call the forward of the wrapper, not of its module",
                  gradients_[passed_by_->second].name));
}

void BackwardTracker::require_no_failed_backward() const {
  if (phase_ != Phase::running) return;
  throw UsageError(
      "the last backward failed in the middle of a step: call abandon_step(), or forward of the wrapper if there is "
      "one, before the next backward");
}

void BackwardTracker::end_from(EndStage stage) {
  const auto held = lock();
  const torch::NoGradGuard no_grad;
  under_way_.reset();
  left_open_ = false;
  if (turns_) turns_->backward_ended();
  if (phase_ == Phase::local) {
    phase_ = Phase::idle;
    listener_.end_local_backward();
  }
  for (const auto next : {EndStage::send, EndStage::await, EndStage::deliver}) {
    if (next >= stage && phase_ == Phase::running) listener_.end_backward(next);
  }
}

void BackwardTracker::forget_left_open() {
  const auto held = lock();
  if (!in_backward()) left_open_ = false;
}

void BackwardTracker::enter(Phase phase) {
  phase_ = phase;
  if (phase == Phase::idle) left_open_ = false;
  if (phase != Phase::running) return;
  arrivals_.assign(gradients_.size(), 0);
  order_.clear();
}

// Runs before autograd accumulates, so that what earlier backwards left can be told from what this one adds.
void BackwardTracker::arriving(size_t gradient) {
  const auto held = lock();
  const torch::NoGradGuard no_grad;
  const bool stale = phase_ != Phase::idle && under_way_.expired();
  if (phase_ == Phase::idle || stale) {
    if (turns_ && turns_->is_others(gradients_[gradient].parameter)) {
      passing_[gradient] = true;
      passed_by_ = {torch::autograd::get_current_graph_task_id(), gradient};
      return;
    }
    begin();
  } else if (phase_ == Phase::local && listener_.synchronises()) {
    end();  // of a micro-batch that a node of an outer backward has run; the last one follows in another node
    begin();
  } else if (options_.splits && recomputes_ && phase_ == Phase::running && arrivals_[gradient] > 0) {
    for (const auto stage : {EndStage::send, EndStage::await, EndStage::deliver}) listener_.end_backward(stage);
    begin();
  }
  listener_.arriving(gradient);
}

void BackwardTracker::arrived(size_t gradient) {
  const auto held = lock();
  const torch::NoGradGuard no_grad;
  if (passing_[gradient]) {
    passing_[gradient] = false;
    return;
  }
  listener_.arrived(gradient);
}

bool BackwardTracker::count(size_t gradient) {
  if (arrivals_[gradient]++ == 0) order_.push_back(gradient);
  if (!options_.static_graph) return true;
  if (expected_arrivals_.empty()) return false;  // complete at the end of the first backward
  if (arrivals_[gradient] > expected_arrivals_[gradient]) refuse(gradient);
  return arrivals_[gradient] == expected_arrivals_[gradient];
}

void BackwardTracker::require_all_arrivals() const {
  if (!options_.static_graph || expected_arrivals_.empty()) return;
  for (size_t i = 0; i < gradients_.size(); ++i) {
    if (arrivals_[i] != expected_arrivals_[i]) refuse(i);
  }
}

void BackwardTracker::refuse(size_t gradient) const {
  throw UsageError(fmt::format(
      "static_graph: the gradient of {} was computed {} times in this backward, but {} times in the first: the graph "
      "has changed; run the same graph in every step, or unset static_graph",
      gradients_[gradient].name, arrivals_[gradient], expected_arrivals_[gradient]));
}

void BackwardTracker::expect_the_same() {
  if (expected_arrivals_.empty()) expected_arrivals_ = arrivals_;
}

void BackwardTracker::detach() {
  hooks_.reset();
  turns_.reset();
  alive_.reset();
  *detached_ = true;
}

}  // namespace shoal
