#pragma once
// End of a program that the bench has started.

#include <sys/types.h>

#include <optional>

#include "launch/signals.h"

namespace shoal::cli {

// Waits for the program, the leader of its process group; returns the status as of waitpid(). Nothing: a signal has
// asked the bench to stop, which the group has been told and the program has ended. A second one kills the group.
std::optional<int> wait_for_end(pid_t program, Signals& signals);

}  // namespace shoal::cli
