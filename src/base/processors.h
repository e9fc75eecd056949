#pragma once
// Processors that this process may use.

#include <sched.h>

#include <filesystem>
#include <optional>
#include <vector>

namespace shoal {

// Those that the processor time which cgroups allow to this process is worth, rounded down, at least 1: of a container
// with `--cpus 2`, 2. Nothing where there is no limit. root: of the file system.
std::optional<int> processor_limit(const std::filesystem::path& root = "/");

// All of this host, but no more than processor_limit(); both as at the first call.
int processors_of_host();
// Those of them on which this process may run.
int processors();

// Those for one of several processes of a host, at least 1. own, others: on which this one and the other ones may run.
// A processor is divided among the processes that may run on it, and the limit of cgroups among all.
int share_of_processors(const cpu_set_t& own, const std::vector<cpu_set_t>& others, std::optional<int> limit);
// Those for this process. others: the ids of the other ones.
int share_of_processors(const std::vector<int>& others);

}  // namespace shoal
