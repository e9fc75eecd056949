#pragma once
// State of a FullyShardedDataParallel.

#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "engine/paging/pager.h"
#include "engine/sharded/sharded_module.h"
#include "engine/wrapper/data_parallel_state.h"
#include "module/units.h"
#include "shoal/fsdp.h"
#include "strategy/fsdp/unit_reduction.h"

namespace shoal {

struct FullyShardedCore::Shards {
  FullyShardedDataParallelOptions options;
  ShardGroups groups;
  std::vector<Unit> units{};
  std::shared_ptr<Pager> pager{};  // nullptr if all parameters are always in memory
  std::shared_ptr<ShardedModule> module{};
  // A unit's frozen parameters of one dtype.
  struct Frozen {
    std::string unit;
    std::vector<NamedTensor> parameters;
    FlatLayout layout;
    std::shared_ptr<ParameterGather> gather;
  };
  std::vector<Frozen> frozen{};
  // While summon_full_params holds the parameters.
  struct Hold {
    SummonFullParamsOptions options;
    std::set<std::string> left_out{};                       // units
    std::vector<std::pair<at::Tensor, at::Tensor>> undo{};  // memory of this rank, and what goes back there
    std::vector<at::Tensor> grads{};                        // what grad() was, by gradient of the reducer
  };
  std::optional<Hold> hold{};
  int defer_depth = 0;  // scopes of defer_all_reduce
  // Buffers, and their own dtypes, by number; empty: as they are.
  std::vector<std::pair<at::Tensor, at::ScalarType>> buffer_dtypes{};

  // A parameter's pieces on all ranks, as `of` gives them, together: on every rank. Collective.
  at::Tensor assemble(const at::Tensor& parameter, at::ScalarType dtype, const std::string& name,
                      const std::function<at::Tensor(const OwnedPiece&)>& of) const;
  bool grad_op() const {
    return options.sharding_strategy == ShardingStrategy::shard_grad_op ||
           options.sharding_strategy == ShardingStrategy::hybrid_shard_grad_op;
  }
};

std::string sharding_name(ShardingStrategy strategy);
// One line per option, for agree().
std::vector<std::string> describe(const FullyShardedDataParallelOptions& options);
// A unit in labels and errors.
std::string title(const Unit& unit);

// Creates the groups of the ranks that share one copy of the model, and of those with equal shards. Collective.
ShardGroups make_shard_groups(const Group& group, const FullyShardedDataParallelOptions& options);

// Shards the parameters of `state` and creates its reducer. Collective.
void shard_parameters(DataParallelCore::State& state, FullyShardedCore::Shards& shards);

// Throws DisagreeError if ranks that own the same ranges have started from different values. Collective.
void require_equal_replicas(const DataParallelCore::State& state, FullyShardedCore::Shards& shards);

// "Half", or "none".
std::string name_of(const std::optional<at::ScalarType>& dtype);

}  // namespace shoal
