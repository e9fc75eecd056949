#pragma once
// A few words that one process shows and others read, also after its death.

#include <array>
#include <atomic>
#include <cstdint>

namespace shoal::shm {

// Whoever reads sees all words of one write, wherever the writer was killed: a write goes to the slot that nobody
// reads, and counts once it is complete. Lies in shared memory; zeros are a notice that was never written.
class Notice {
 public:
  static constexpr size_t count = 40;
  using Words = std::array<uint64_t, count>;

  // For one thread at a time.
  void write(const Words& words) {
    const auto next = version_.load(std::memory_order_relaxed) + 1;
    std::atomic_thread_fence(std::memory_order_release);  // who reads one of these words sees the version before it
    for (size_t i = 0; i < count; ++i) slots_[next % 2][i].store(words[i], std::memory_order_relaxed);
    version_.store(next, std::memory_order_release);
  }

  Words read() const {
    Words words;
    auto version = version_.load(std::memory_order_acquire);
    while (true) {
      for (size_t i = 0; i < count; ++i) words[i] = slots_[version % 2][i].load(std::memory_order_relaxed);
      std::atomic_thread_fence(std::memory_order_acquire);
      const auto now = version_.load(std::memory_order_acquire);
      if (now == version) return words;
      version = now;
    }
  }

 private:
  std::atomic<uint64_t> version_;
  std::atomic<uint64_t> slots_[2][count];
};

}  // namespace shoal::shm
