#pragma once
// Counts the bytes that libtorch's CPU allocator has handed out, on whatever thread they come and go.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <atomic>

namespace shoal::test {

class MemoryMeter : public c10::Allocator {
 public:
  // The process's meter; installed at the first call and kept, since blocks may outlive any scope.
  static MemoryMeter& instance() {
    static auto* meter = new MemoryMeter(c10::GetCPUAllocator());
    return *meter;
  }

  int64_t live() const { return live_; }
  int64_t peak() const { return peak_; }  // since the last reset_peak()
  void reset_peak() { peak_ = live_.load(); }

  c10::DataPtr allocate(size_t size) override {
    auto* block = new Block{inner_->allocate(size), static_cast<int64_t>(size), this};
    const int64_t now = live_ += block->size;
    int64_t peak = peak_;
    while (now > peak && !peak_.compare_exchange_weak(peak, now)) continue;
    return {block->memory.get(), block, &release, c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }

 private:
  struct Block {
    c10::DataPtr memory;
    int64_t size;
    MemoryMeter* meter;
  };

  explicit MemoryMeter(c10::Allocator* inner) : inner_(inner) { c10::SetCPUAllocator(this, /*priority=*/1); }

  static void release(void* context) {
    auto* block = static_cast<Block*>(context);
    block->meter->live_ -= block->size;
    delete block;
  }

  c10::Allocator* inner_;
  std::atomic<int64_t> live_ = 0;
  std::atomic<int64_t> peak_ = 0;
};

}  // namespace shoal::test
