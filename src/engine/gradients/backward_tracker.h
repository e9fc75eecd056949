#pragma once
// Tracker of autograd's backwards: where they begin and end, which gradients arrive in them, and how often.

#include <torch/types.h>

#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "engine/buckets/bucket_plan.h"
#include "engine/gradients/forward_turns.h"
#include "engine/gradients/gradient_hooks.h"

namespace shoal {

// End of a backward that synchronises. A wrapper that shares a backward with others goes on to a stage when all of them
// have finished the one before.
enum class EndStage {
  send,     // what has not been sent yet
  await,    // the sums, and whether all ranks have finished the step
  deliver,  // the sums; does not communicate
};

// A wrapper's place in a backward.
struct BackwardPlace {
  int backward;   // autograd's number
  int64_t order;  // grows with each wrapper that a backward reaches
};

// Listener to a backward. Called by the thread that runs it, under BackwardTracker::lock() and without grad mode.
class BackwardListener {
 public:
  // Before the first gradient of a backward. The listener enters a phase.
  virtual void begin_backward() = 0;
  // Before and after autograd adds to grad().
  virtual void arriving(size_t gradient) = 0;
  virtual void arrived(size_t gradient) = 0;
  // End of a backward. A local one is idle again by then; in a synchronising one the listener enters `idle` itself, in
  // the last stage or before.
  virtual void end_local_backward() = 0;
  virtual void end_backward(EndStage stage) = 0;
  // A backward has thrown that synchronises, or that has reached an output and no gradient. Its caller has not got
  // control yet. Must not communicate. Not always called if a device's thread has run it, see left_open().
  virtual void backward_failed(const BackwardPlace& /*where*/) {}
  // Whether a backward that begins now would synchronise.
  virtual bool synchronises() const { return false; }
  // Whether it shares a backward with other wrappers, see EndStage.
  virtual bool ends_with_others() const { return false; }

 protected:
  ~BackwardListener() = default;
};

class BackwardTracker {
 public:
  // local: the backward only adds to grad(). running: the backward synchronises.
  enum class Phase { idle, local, running };
  struct Options {
    bool find_unused_parameters = false;
    bool static_graph = false;
    bool open = false;   // see ForwardTurns
    bool apart = false;  // see ForwardTurns
    // Where a recomputed block computes a gradient again, a step ends before it, and another begins. False: it is
    // counted again.
    bool splits = false;
  };

  // The references must outlive this object.
  BackwardTracker(const std::vector<Gradient>& gradients, const Options& options, BackwardListener& listener);
  BackwardTracker(const BackwardTracker&) = delete;
  BackwardTracker& operator=(const BackwardTracker&) = delete;

  // Needed because autograd runs one backward thread per device.
  [[nodiscard]] std::unique_lock<std::recursive_mutex> lock() { return std::unique_lock(mutex_); }
  // True while autograd runs a backward on this thread.
  static bool in_backward();
  // Whether a backward that is watched runs still, and this is a hook of it or a thread that evaluates meanwhile.
  bool under_way();

  // Call before a forward that records a graph. See GradientHooks.
  void renew_hooks() {
    if (hooks_) hooks_->renew();
  }
  // Notes a forward that records a graph. See ForwardTurns: a backward that reaches a parameter of several wrappers is
  // of the one that ran its forward last.
  void note_forward();
  // Walks the graph of a forward that will be synchronised, and hooks its outputs.
  // reached: set to true when a backward reaches an output; nullptr: nothing.
  void inspect(const std::vector<at::Tensor>& outputs, const std::shared_ptr<bool>& reached = nullptr);
  // With find_unused_parameters: gradients that no graph inspected since the last call reaches. Empty otherwise. A
  // forward without known outputs may reach all.
  std::vector<size_t> take_unreached();

  // Begin and end of a backward that reaches no gradient, for a rank without samples. UsageError if a backward that
  // synchronises has failed and its step has not been abandoned.
  void begin();
  void end() { end_from(EndStage::send); }
  // Whether a backward has reached an output or a gradient, and not ended: outside of a backward, it has failed.
  bool left_open() const { return left_open_; }
  void forget_left_open();
  // Entering `running` resets the arrivals.
  void enter(Phase phase);
  Phase phase() const { return phase_; }

  // Counts an arrival in the running backward. True when the gradient is complete, as far as is known. UsageError if a
  // static graph has changed.
  bool count(size_t gradient);
  // UsageError if a static graph has changed: some gradient arrived less often than in the first backward.
  void require_all_arrivals() const;
  // Records the arrivals of the first backward; with static_graph, later ones must match them.
  void expect_the_same();
  // Order in which gradients first arrived in the running (or the last) synchronising backward.
  const std::vector<size_t>& order() const { return order_; }
  // How often each gradient arrived in that backward.
  const std::vector<int>& arrivals() const { return arrivals_; }

  // Removes the hooks: later backwards are not tracked. Those of earlier forwards are a UsageError.
  void detach();
  bool attached() const { return hooks_.has_value(); }

 private:
  class Watch;
  enum class Until { this_one, outermost };
  void watch(Until until);
  void follow(Until until);
  void queue(const std::shared_ptr<Watch>& watch, EndStage stage);
  void ended(const std::shared_ptr<Watch>& watch, EndStage stage);
  void end_from(EndStage stage);
  void failed(const Watch& watch) noexcept;
  void require_no_failed_backward() const;
  void require_own_forward() const;
  void arriving(size_t gradient);
  void arrived(size_t gradient);
  [[noreturn]] void refuse(size_t gradient) const;

  const std::vector<Gradient>& gradients_;
  Options options_;
  BackwardListener& listener_;

  std::recursive_mutex mutex_;
  Phase phase_ = Phase::idle;
  std::weak_ptr<void> under_way_;  // Watch of the backward whose end ends the step
  int64_t watches_ = 0;            // so far
  bool left_open_ = false;
  bool recomputes_ = false;                   // a node of it has run the first backward of the step
  std::optional<std::vector<bool>> reached_;  // reached by some forward's graph
  std::vector<int> arrivals_;                 // arrivals per gradient in this backward
  std::vector<size_t> order_;
  std::vector<int> expected_arrivals_;  // empty before the first backward

  std::optional<ForwardTurns> turns_;
  std::vector<bool> passing_;  // gradients that autograd is adding, of another wrapper's backward
  std::optional<std::pair<int, size_t>>
      passed_by_{};  // autograd's number of the last such backward, and a gradient of it

  // Hooks on outputs may outlive this object.
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
  std::shared_ptr<bool> detached_ = std::make_shared<bool>(false);
  // Last member: its callbacks use all of the above.
  std::optional<GradientHooks> hooks_;
};

}  // namespace shoal
