#pragma once
// Meter of the bytes that libtorch's CPU allocator has handed out, on any thread.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <mutex>
#include <unordered_map>

namespace shoal::test {

class MemoryMeter : public c10::Allocator {
 public:
  // The meter of the process; installed by the first call and never removed, because blocks may outlive any scope.
  static MemoryMeter& instance() {
    static auto* meter = new MemoryMeter(c10::GetCPUAllocator());
    return *meter;
  }

  int64_t live() const { return live_; }
  int64_t peak() const { return peak_; }  // since the last reset_peak()
  void reset_peak() { peak_ = live_.load(); }

  c10::DataPtr allocate(size_t size) override {
    auto memory = inner_->allocate(size);
    void* data = memory.get();
    if (data == nullptr) return memory;
    const auto bytes = static_cast<int64_t>(size);
    {
      const std::lock_guard lock(mutex_);
      blocks_[data] = {std::move(memory), bytes};
    }
    const int64_t now = live_ += bytes;
    int64_t peak = peak_;
    while (now > peak && !peak_.compare_exchange_weak(peak, now)) continue;
    return {data, data, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }

 private:
  struct Block {
    c10::DataPtr memory;
    int64_t bytes = 0;
  };

  explicit MemoryMeter(c10::Allocator* inner) : inner_(inner) { c10::SetCPUAllocator(this, /*priority=*/1); }

  // Kernels that use raw memory identify a block by its address only; those that have cached the allocator before this
  // meter was installed free blocks here that they got elsewhere.
  static void release(void* data) {
    auto& meter = instance();
    Block block;
    {
      const std::lock_guard lock(meter.mutex_);
      const auto place = meter.blocks_.find(data);
      if (place == meter.blocks_.end()) return meter.inner_->raw_deleter()(data);
      block = std::move(place->second);
      meter.blocks_.erase(place);
    }
    meter.live_ -= block.bytes;
  }

  std::mutex mutex_;
  std::unordered_map<void*, Block> blocks_;
  c10::Allocator* inner_;
  std::atomic<int64_t> live_ = 0;
  std::atomic<int64_t> peak_ = 0;
};

}  // namespace shoal::test
