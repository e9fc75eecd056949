#pragma once
// Waiting for peers of this host.

#include <chrono>
#include <functional>

#include "comm/shm/host_memory.h"

namespace shoal {

// Goes on with all operations of this process until `finished()`; false at the end of `limit`. `may_spin`: every rank
// of the host has a core of its own, so that looking again for some microseconds costs nobody anything; otherwise the
// process sleeps in the kernel at once.
bool wait_until(HostMemory& memory, bool may_spin, std::chrono::nanoseconds limit,
                const std::function<bool()>& finished);

// Whether `ranks` processes of this host have a core each.
bool cores_suffice(int ranks);

}  // namespace shoal
