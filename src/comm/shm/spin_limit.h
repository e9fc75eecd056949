#pragma once
// Limit on how long a wait polls before it sleeps in the kernel.

#include <algorithm>
#include <atomic>
#include <chrono>

namespace shoal::shm {

// Follows the waits of a process: a sleep and its wake-up cost up to 100 microseconds, so waits of a few hundred, as in
// steps of small models, poll until their end, and long ones give their core up early. Source: the competitive spinning
// of Karlin, Li, Manasse and Owicki, "Empirical Studies of Competitive Spinning" (SOSP 1991). Thread-safe.
class SpinLimit {
 public:
  using Time = std::chrono::nanoseconds;
  static constexpr Time least = std::chrono::microseconds(50);
  static constexpr Time most = std::chrono::microseconds(400);

  Time now() const { return Time(limit_.load(std::memory_order_relaxed)); }

  // A wait has slept, and has taken so long from its begin.
  void slept(Time waited) {
    const auto limit = now();
    const auto next = waited <= most ? std::clamp(2 * waited, limit, most) : std::max(least, limit - limit / 4);
    limit_.store(next.count(), std::memory_order_relaxed);
  }

 private:
  std::atomic<Time::rep> limit_ = least.count();
};

}  // namespace shoal::shm
