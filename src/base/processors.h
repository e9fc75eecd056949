#pragma once
// Processors that this process may use.

#include <filesystem>
#include <optional>

namespace shoal {

// Those that the processor time which cgroups allow to this process is worth, rounded down, at least 1: of a container
// with `--cpus 2`, 2. Nothing where there is no limit. root: of the file system.
std::optional<int> processor_limit(const std::filesystem::path& root = "/");

// All of this host, but no more than processor_limit(); both as at the first call.
int processors_of_host();
// Those of them on which this process may run.
int processors();

}  // namespace shoal
