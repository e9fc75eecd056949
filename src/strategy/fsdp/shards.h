#pragma once
// What FullyShardedDataParallel keeps.

#include <memory>
#include <string>
#include <vector>

#include "engine/data_parallel_state.h"
#include "engine/pager.h"
#include "engine/sharded_module.h"
#include "module/units.h"
#include "shoal/strategy/fsdp.h"
#include "strategy/fsdp/unit_exchange.h"

namespace shoal {

struct FullyShardedCore::Shards {
  FullyShardedDataParallelOptions options;
  ShardGroups groups;
  std::vector<Unit> units{};
  std::shared_ptr<Pager> pager{};  // none where all parameters are in memory
  std::shared_ptr<ShardedModule> module{};
  // A unit's frozen parameters of one dtype.
  struct Frozen {
    std::vector<NamedTensor> parameters;
    FlatLayout layout;
    std::shared_ptr<ParameterGather> gather;
  };
  std::vector<Frozen> frozen{};
  std::vector<at::Tensor> before_hold{};  // this rank's pieces, while changes will be undone
  int64_t holds = 0;
  int defer_depth = 0;                          // scopes of defer_all_reduce
  std::vector<at::ScalarType> buffer_dtypes{};  // by number of the buffer: its own; empty: as they are

  bool grad_op() const {
    return options.sharding_strategy == ShardingStrategy::shard_grad_op ||
           options.sharding_strategy == ShardingStrategy::hybrid_shard_grad_op;
  }
};

// The ranks that divide a model among them, and those that have equal shards. Collective.
ShardGroups make_shard_groups(const Group& group, const FullyShardedDataParallelOptions& options);

// Divides the parameters of `state`, which gets its reducer. Collective.
void divide_parameters(DataParallelCore::State& state, FullyShardedCore::Shards& shards);

}  // namespace shoal
