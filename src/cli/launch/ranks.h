#pragma once
// Ranks of the program's own commands, on this host.

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "comm/rendezvous/launch_environment.h"
#include "launch/launcher.h"

namespace shoal::cli {

// Starts the ranks as `how` says, whose threads must be known; each runs `rank`. They are forked from this process,
// which has loaded libtorch: that takes 0.3 s of processor time, and 60 MiB that forked ranks share. If this process
// has other threads, whose locks would stay locked in a fork, they are started with `line`, the command line, instead.
// Returns the launcher's exit code.
int launch_ranks(LaunchOptions how, const std::vector<std::string>& line, const std::function<int()>& rank);

// Place of this process among its launcher's ranks. ranks: as --ranks gives them, which also starts them where Slurm's
// batch script for several tasks on one node has no place.
Placement find_place(const std::optional<int>& ranks);

}  // namespace shoal::cli
