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
  // Without choice: rank 0's.
  void choose(bool broadcast, std::shared_ptr<BufferHook> hook = nullptr,
              BufferHookLocation location = BufferHookLocation::pre_forward);

  bool hooked() const { return hook_ != nullptr; }

  // Around a forward that synchronises. lead: the lowest rank that has a batch. Collective.
  void before_forward(const Group& group, const std::vector<NamedTensor>& buffers, int lead, int64_t step);
  // Also after one that has failed here, since the others call it; again: does nothing.
  void after_forward();
  // What after_forward() has begun is there. Collective.
  void complete();

 private:
  bool broadcast_ = true;
  std::shared_ptr<BufferHook> hook_;
  BufferHookLocation location_ = BufferHookLocation::pre_forward;
  std::function<PendingExchange()> due_;
  PendingExchange pending_;
};

}  // namespace shoal
