#include "comm/shm/wait.h"

#include <algorithm>

#include "base/processors.h"
#include "shoal/detail/clock.h"

namespace shoal::shm {
namespace {

void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

bool cores_suffice(int ranks) {
  return ranks <= processors();
}

bool wait_until(HostMemory& memory, bool may_spin, std::chrono::nanoseconds limit,
                const std::function<bool()>& finished) {
  const auto start = Clock::now();
  const bool spins = may_spin && !memory.host_load().crowded(start);
  const auto spin_end = start + (spins ? std::min(limit, memory.spin_limit().now()) : std::chrono::nanoseconds(0));
  do {
    memory.poll();
    if (finished()) return true;
    for (int i = 0; i < 16; ++i) pause_briefly();
  } while (Clock::now() < spin_end);
  while (true) {
    const auto seen = memory.bell();
    memory.prepare_sleep();
    memory.poll();
    const auto left = start + limit - Clock::now();
    if (finished() || left.count() <= 0) {
      memory.cancel_sleep();
      if (spins) memory.spin_limit().slept(Clock::now() - start);
      return finished();
    }
    memory.sleep(seen, left);
  }
}

}  // namespace shoal::shm
