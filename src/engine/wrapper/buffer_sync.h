#pragma once
// Synchronisation of a wrapper's buffers: a broadcast from rank 0, or a buffer hook.

#include <functional>
#include <memory>
#include <vector>

#include "module/walk.h"
#include "shoal/hooks.h"

namespace shoal {

class BufferSync {
 public:
  // Default: broadcast from rank 0.
  void choose(bool broadcast, std::shared_ptr<BufferHook> hook = nullptr,
              BufferHookLocation location = BufferHookLocation::pre_forward);

  bool hooked() const { return hook_ != nullptr; }

  // Call before and after a forward that synchronises. lead: the lowest rank that has a batch. Collective.
  void before_forward(const Group& group, const std::vector<NamedTensor>& buffers, int lead, int64_t step);
  // Call also after a forward that failed on this rank, because the other ranks call it. A repeated call does nothing.
  void after_forward();
  // Waits for what after_forward() began. Collective.
  void complete();
  // Call before a forward of an evaluation. The first one after a step broadcasts, so that the evaluation is of one
  // model, the one that rank 0 saves. Collective then.
  void before_evaluation(const Group& group, const std::vector<NamedTensor>& buffers, int lead, int64_t step);

  // The next evaluation broadcasts. For ranks that have changed: some may have done so, and others not.
  void forget_evaluation() { evaluated_ = -1; }

 private:
  void sync(const Group& group, const std::vector<NamedTensor>& buffers, int source, int64_t step, const char* what);

  std::vector<std::vector<int64_t>> sizes_;  // of the buffers, when they were broadcast last
  bool broadcast_ = true;
  std::shared_ptr<BufferHook> hook_;
  BufferHookLocation location_ = BufferHookLocation::pre_forward;
  std::function<PendingExchange()> due_;
  PendingExchange pending_;
  int64_t evaluated_ = 0;  // the step after which the last evaluation was
};

}  // namespace shoal
