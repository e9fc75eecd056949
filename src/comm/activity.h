#pragma once
// What this process has called, over all its groups.

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "comm/call_history.h"

namespace shoal {

// Thread-safe.
class Activity {
 public:
  // What this rank calls in a group, for as long as the group lives.
  std::shared_ptr<CallHistory> add_group(const std::string& name, bool keeps_calls) {
    auto history = std::make_shared<CallHistory>(keeps_calls);
    const std::lock_guard lock(mutex_);
    std::erase_if(groups_, [](const auto& entry) { return entry.second.expired(); });
    groups_[name] = history;
    return history;
  }
  // None: there is no such group, or it has gone.
  std::shared_ptr<CallHistory> history(const std::string& group) const {
    const std::lock_guard lock(mutex_);
    const auto found = groups_.find(group);
    return found == groups_.end() ? nullptr : found->second.lock();
  }
  // How many collectives, by group.
  std::map<std::string, uint64_t> entered() const {
    std::map<std::string, uint64_t> counts;
    const std::lock_guard lock(mutex_);
    for (const auto& [name, history] : groups_) {
      if (const auto alive = history.lock()) counts[name] = alive->entered();
    }
    return counts;
  }

  // The calling thread issues or waits for an operation.
  void seen() {
    auto known = first_.load(std::memory_order_relaxed);
    const auto own = std::this_thread::get_id();
    if (known == own) return;
    if (known == std::thread::id() && first_.compare_exchange_strong(known, own)) return;
    several_ = true;
  }
  bool several_threads() const { return several_; }

 private:
  mutable std::mutex mutex_;
  std::map<std::string, std::weak_ptr<CallHistory>> groups_;
  std::atomic<std::thread::id> first_{};
  std::atomic<bool> several_ = false;
};

}  // namespace shoal
