#pragma once
// Identity of this machine and this process, as peers need it.

#include <cstdint>
#include <string>

namespace shoal {

// Equal for two processes exactly when they can see each other's entry in /proc: same boot, same process namespace.
std::string host_identity();

// A process of this host that may end, be replaced by another with the same number, or be stopped.
struct ProcessId {
  int pid = 0;
  uint64_t start_time = 0;  // clock ticks after boot; tells a recycled pid apart
};

enum class ProcessState { running, stopped, gone };

ProcessId this_process();
ProcessState state_of(const ProcessId& process);

}  // namespace shoal
