#pragma once
// Waits for peers on this host.

#include <chrono>
#include <functional>

#include "comm/shm/host_memory.h"

namespace shoal::shm {

// Progresses all operations of this process until `finished()`; false at the end of `limit`. may_spin: every rank of
// the host has a core of its own, so that polling for the time of memory.spin_limit() costs nobody anything, as long as
// other programs leave these cores alone (memory.host_load()). Otherwise the process sleeps in the kernel at once.
bool wait_until(HostMemory& memory, bool may_spin, std::chrono::nanoseconds limit,
                const std::function<bool()>& finished);

// Whether each of `ranks` processes on this host can have a core.
bool cores_suffice(int ranks);

}  // namespace shoal::shm
