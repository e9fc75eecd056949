#pragma once
// What this process has called, over all its groups.

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

namespace shoal {

// Thread-safe.
class Activity {
 public:
  using Count = std::atomic<uint64_t>;

  // The number of collectives that this rank enters in a group, for as long as the group lives.
  std::shared_ptr<Count> add_group(const std::string& name) {
    auto count = std::make_shared<Count>(0);
    const std::lock_guard lock(mutex_);
    std::erase_if(groups_, [](const auto& entry) { return entry.second.expired(); });
    groups_[name] = count;
    return count;
  }
  std::map<std::string, uint64_t> entered() const {
    std::map<std::string, uint64_t> counts;
    const std::lock_guard lock(mutex_);
    for (const auto& [name, count] : groups_) {
      if (const auto alive = count.lock()) counts[name] = *alive;
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
  std::map<std::string, std::weak_ptr<Count>> groups_;
  std::atomic<std::thread::id> first_{};
  std::atomic<bool> several_ = false;
};

}  // namespace shoal
