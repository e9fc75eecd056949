#pragma once
// Record of this process's last calls in all its groups.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "comm/agreement/call_history.h"

namespace shoal {

// Thread-safe.
class Activity {
 public:
  // Adds a group; its history lives as long as the group.
  std::shared_ptr<CallHistory> add_group(const std::string& name, bool keeps_calls) {
    auto history = std::make_shared<CallHistory>(keeps_calls);
    const std::lock_guard lock(mutex_);
    std::erase_if(groups_, [](const auto& entry) { return entry.second.expired(); });
    groups_[name] = history;
    return history;
  }
  // nullptr if there is no such group any more.
  std::shared_ptr<CallHistory> history(const std::string& group) const {
    const std::lock_guard lock(mutex_);
    const auto found = groups_.find(group);
    return found == groups_.end() ? nullptr : found->second.lock();
  }
  // Number of collectives entered, by group.
  std::map<std::string, uint64_t> entered() const {
    std::map<std::string, uint64_t> counts;
    const std::lock_guard lock(mutex_);
    for (const auto& [name, history] : groups_) {
      if (const auto alive = history.lock()) counts[name] = alive->entered();
    }
    return counts;
  }

  // Records that the calling thread makes a group, or issues or waits for an operation.
  void seen() {
    if (Thread::ended) return;
    const auto& own = this_thread();
    if (last_.load(std::memory_order_relaxed) == own.number) return;
    const std::lock_guard lock(mutex_);
    std::erase_if(threads_, [](const auto& thread) { return thread.second.expired(); });
    threads_[own.number] = own.alive;
    last_ = own.number;
  }
  // Whether more than one living thread has done so.
  bool several_threads() const {
    const std::lock_guard lock(mutex_);
    return std::count_if(threads_.begin(), threads_.end(),
                         [](const auto& thread) { return !thread.second.expired(); }) > 1;
  }

 private:
  struct Thread {
    explicit Thread(uint64_t number) : number(number) {}
    ~Thread() { ended = true; }
    // Of the calling thread: destructors of global objects, which may wait for operations, run behind that of this.
    static inline thread_local bool ended = false;

    uint64_t number;  // own numbering, because the system reuses its thread ids
    std::shared_ptr<char> alive = std::make_shared<char>();
  };
  static const Thread& this_thread() {
    static std::atomic<uint64_t> count = 0;
    thread_local const Thread thread(++count);
    return thread;
  }

  mutable std::mutex mutex_;
  std::map<std::string, std::weak_ptr<CallHistory>> groups_;
  std::map<uint64_t, std::weak_ptr<char>> threads_;  // threads that have made groups or called operations, by number
  std::atomic<uint64_t> last_ = 0;                   // number of the last one
};

}  // namespace shoal
