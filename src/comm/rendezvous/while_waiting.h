#pragma once
// Calls of WorldOptions::while_waiting.

#include <chrono>
#include <functional>
#include <utility>

namespace shoal {

// For loops that look at what they wait for more often: makes a call every 100 ms.
class WhileWaiting {
 public:
  explicit WhileWaiting(std::function<void()> call) : call_(std::move(call)) {}

  // Throws what the program's function throws.
  void look() {
    const auto now = std::chrono::steady_clock::now();
    if (!call_ || now < next_) return;
    next_ = now + pause;
    call_();
  }

 private:
  static constexpr std::chrono::milliseconds pause{100};

  const std::function<void()> call_;
  std::chrono::steady_clock::time_point next_ = std::chrono::steady_clock::now() + pause;
};

}  // namespace shoal
