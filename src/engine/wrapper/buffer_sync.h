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

  // Call around a forward and backward that synchronise. lead: the lowest rank that has a batch. The broadcast after backward
  // makes buffers equal for evaluations, where nothing is sent, and for what is saved. Collective.
  void before_forward(const Group& group, const std::vector<NamedTensor>& buffers, int lead, int64_t step);
  // Call also after a forward that failed on this rank, because the other ranks call it. A repeated call does nothing.
  void after_forward();
  void after_backward(const Group& group, const std::vector<NamedTensor>& buffers, int lead, int64_t step);

 private:
  // Waits for what after_forward() began. Collective.
  void complete();

  bool broadcast_ = true;
  std::shared_ptr<BufferHook> hook_;
  BufferHookLocation location_ = BufferHookLocation::pre_forward;
  std::function<PendingExchange()> due_;
  PendingExchange pending_;
};

}  // namespace shoal
