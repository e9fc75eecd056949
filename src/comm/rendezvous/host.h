#pragma once
// Identity of this host and this process.

#include <cstdint>
#include <string>

namespace shoal {

// Equal for two processes exactly if they can see each other in /proc: same boot, same process namespace. Without /proc
// (proc: where it is), each process is a host of its own. No blanks.
std::string host_identity(const std::string& proc = "/proc");

// Identity of a process on this host; distinguishes a process from a later one with the same pid.
struct ProcessId {
  int pid = 0;
  uint64_t start_time = 0;  // clock ticks after boot; tells a recycled pid apart
};

enum class ProcessState { running, stopped, gone };

ProcessId this_process();
ProcessId process_of(int pid);  // the one that has this pid now
ProcessState state_of(const ProcessId& process);

}  // namespace shoal
