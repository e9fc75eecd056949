#include "strategy/megatron/scalar_groups.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "shoal/error.h"

namespace shoal {
namespace {

std::set<int> set_of_ranks(const Group& group) {
  std::set<int> ranks;
  for (int rank = 0; rank < group.size(); ++rank) ranks.insert(group.world_rank(rank));
  return ranks;
}

int64_t common_ranks(const Group& data_parallel, const Group& model_parallel) {
  const auto model = set_of_ranks(model_parallel);
  const auto replicas = set_of_ranks(data_parallel);
  return std::count_if(replicas.begin(), replicas.end(), [&](int rank) { return model.count(rank) > 0; });
}

}  // namespace

void require_own_replica(const Group& data_parallel, const Group& model_parallel) {
  const auto common = common_ranks(data_parallel, model_parallel);
  if (common == 1) return;
  throw UsageError(
      fmt::format("DistributedOptimizer: model_parallel_group has {} of the {} data-parallel ranks; with "
                  "shard_within_host give the ranks that hold one replica of the model, of which this is the only one "
                  "among them",
                  common, data_parallel.size()));
}

std::vector<Group> scalar_groups(const Group& data_parallel, const std::optional<Group>& model_parallel) {
  if (!model_parallel) return {data_parallel};
  const auto common = common_ranks(data_parallel, *model_parallel);
  if (common == data_parallel.size()) return {*model_parallel};
  if (common == 1) return {data_parallel, *model_parallel};
  throw UsageError(fmt::format(
      "DistributedOptimizer: model_parallel_group has {} of the {} data-parallel ranks; give the ranks that "
      "hold one replica of the model, this one among them, or all ranks of all replicas",
      common, data_parallel.size()));
}

bool cover(const std::vector<Group>& scalars, const Group& sharers) {
  std::set<int> covered;
  for (const auto& group : scalars) covered.merge(set_of_ranks(group));
  const auto ranks = set_of_ranks(sharers);
  return std::includes(covered.begin(), covered.end(), ranks.begin(), ranks.end());
}

bool counts(const Group& group, const Group& sharers) {
  return set_of_ranks(group).count(sharers.world_rank(0)) > 0;
}

}  // namespace shoal
