#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/types.h>

#include <string>
#include <vector>

#include "shoal/error.h"
#include "shoal/shard_gossip.h"

namespace shoal {

void ShardGossipOptions::validate(int hosts) const {
  std::vector<std::string> faults;
  const auto positive = [&](const char* name, double value, const char* unit) {
    if (!(value > 0)) faults.push_back(fmt::format("{} is {}: give {} above 0", name, value, unit));
  };
  positive("neighbour_timeout_seconds", neighbour_timeout_seconds, "seconds");
  positive("bucket_cap_mb", bucket_cap_mb, "MiB");
  if (topology && topology->size() != hosts) {
    faults.push_back(fmt::format("topology {} is for {} hosts, there are {}: make_topology(name, across.size())",
                                 topology->name(), topology->size(), hosts));
  }
  if (topology && topology->kind() == Stochastic::column) {
    faults.push_back(fmt::format(
        "topology {} is for push-sum, which shards do not support; give a row-stochastic or doubly stochastic topology",
        topology->name()));
  }
  if (exchange_dtype && !at::isFloatingType(*exchange_dtype)) {
    faults.push_back(fmt::format("exchange_dtype {}: give a floating-point one", toString(*exchange_dtype)));
  }
  if (!faults.empty()) throw UsageError(fmt::format("ShardGossipOptimizer: {}", fmt::join(faults, "; ")));
}

}  // namespace shoal
