#pragma once
// Backwards as autograd runs them: where they begin and end, which gradients come in them, and how often.

#include <torch/types.h>

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "engine/gradients/gradient_hooks.h"
#include "engine/reducer/bucket_plan.h"

namespace shoal {

// Told of a backward, by the thread that runs it, under BackwardTracker::lock() and without gradients being recorded.
class BackwardListener {
 public:
  // Before its first gradient. Enters a phase.
  virtual void begin_backward() = 0;
  // Before autograd adds to grad(), and after.
  virtual void arriving(size_t gradient) = 0;
  virtual void arrived(size_t gradient) = 0;
  // Of one that was begun. Local ones are idle again by then; one that synchronises is so when the listener says it.
  virtual void end_local_backward() = 0;
  virtual void end_backward() = 0;

 protected:
  ~BackwardListener() = default;
};

class BackwardTracker {
 public:
  // local: the backward only adds to grad(). running: it synchronises.
  enum class Phase { idle, local, running };
  struct Options {
    bool find_unused_parameters = false;
    bool static_graph = false;
  };

  // The references stay.
  BackwardTracker(const std::vector<Gradient>& gradients, const Options& options, BackwardListener& listener);
  BackwardTracker(const BackwardTracker&) = delete;
  BackwardTracker& operator=(const BackwardTracker&) = delete;

  // One backward thread per device may report gradients.
  [[nodiscard]] std::unique_lock<std::recursive_mutex> lock() { return std::unique_lock(mutex_); }
  // Whether autograd is calling.
  static bool in_backward();

  // Looks at the graph of a forward that will be synchronised.
  void inspect(const std::vector<at::Tensor>& outputs);
  // Those that no forward's graph reaches which has been looked at since the last call, where unused parameters are
  // looked for; else none.
  std::vector<size_t> take_unreached();

  // For a backward of the caller's own, without a gradient.
  void begin();
  void end();
  // Entering `running` starts to count arrivals.
  void enter(Phase phase);
  Phase phase() const { return phase_; }

  // Counts an arrival of the running backward. True when the gradient is complete, as far as is known. UsageError where
  // a static graph has changed.
  bool count(size_t gradient);
  // UsageError where a static graph has changed: some came less often than in the first backward.
  void require_all_arrivals() const;
  // The running backward was the first, if there was none before: others are expected to be like it.
  void expect_the_same();
  // In which gradients first came in the running backward, or the last one that ran.
  const std::vector<size_t>& order() const { return order_; }

  // Backwards are not told of any more.
  void detach();
  bool attached() const { return hooks_.has_value(); }

 private:
  void watch();
  void arriving(size_t gradient);
  void arrived(size_t gradient);
  [[noreturn]] void refuse(size_t gradient) const;

  const std::vector<Gradient>& gradients_;
  Options options_;
  BackwardListener& listener_;

  std::recursive_mutex mutex_;
  Phase phase_ = Phase::idle;
  std::weak_ptr<void> under_way_;             // the outermost backward that was seen to begin, while it runs
  std::optional<std::vector<bool>> reached_;  // in some forward's graph
  std::vector<int> arrivals_;                 // times a gradient came in this backward
  std::vector<size_t> order_;
  std::vector<int> expected_arrivals_;  // empty: no backward here yet

  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);  // hooks on outputs may outlive this object
  // Last: its callbacks use all of the above.
  std::optional<GradientHooks> hooks_;
};

}  // namespace shoal
