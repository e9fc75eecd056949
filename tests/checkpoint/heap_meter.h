#pragma once
// Meter of this program's C++ heap. Include it in one file of a program: it replaces operator new.

#include <malloc.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace shoal::test {

inline std::atomic<int64_t> heap_live = 0;
inline std::atomic<int64_t> heap_peak = 0;

// nullptr if there is no memory.
inline void* heap_take(size_t size) noexcept {
  void* memory = std::malloc(size);
  if (memory == nullptr) return nullptr;
  const int64_t now = heap_live += static_cast<int64_t>(malloc_usable_size(memory));
  int64_t peak = heap_peak;
  while (now > peak && !heap_peak.compare_exchange_weak(peak, now)) continue;
  return memory;
}

inline void* heap_take_or_throw(size_t size) {
  void* memory = heap_take(size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

inline void heap_give(void* memory) {
  if (memory == nullptr) return;
  heap_live -= static_cast<int64_t>(malloc_usable_size(memory));
  std::free(memory);
}

}  // namespace shoal::test

void* operator new(size_t size) {
  return shoal::test::heap_take_or_throw(size);
}
void* operator new[](size_t size) {
  return shoal::test::heap_take_or_throw(size);
}
// Overridden because sanitizers have their own, whose memory must not be freed here.
void* operator new(size_t size, const std::nothrow_t&) noexcept {
  return shoal::test::heap_take(size);
}
void* operator new[](size_t size, const std::nothrow_t&) noexcept {
  return shoal::test::heap_take(size);
}
void operator delete(void* memory) noexcept {
  shoal::test::heap_give(memory);
}
void operator delete[](void* memory) noexcept {
  shoal::test::heap_give(memory);
}
void operator delete(void* memory, size_t) noexcept {
  shoal::test::heap_give(memory);
}
void operator delete[](void* memory, size_t) noexcept {
  shoal::test::heap_give(memory);
}
