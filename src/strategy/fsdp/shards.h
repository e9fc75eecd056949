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
  // Frozen parameters of one unit and dtype, which all have float32 copies, or none.
  struct Frozen {
    std::vector<NamedTensor> parameters;
    FlatLayout layout;
    std::vector<Range> owners;  // by rank of the shard group
    std::shared_ptr<ParameterGather> gather;
    std::vector<FrozenPiece> pieces;  // this rank's
    // The pieces' float32 copies, in the layout: of all ranks where parameters are always in memory, else this rank's.
    // Undefined: there are none.
    at::Tensor copies;

    at::Tensor current(const FrozenPiece& piece) const {
      return current_values(*gather, piece.slice, piece.values(), piece.former);
    }
  };
  std::vector<Frozen> frozen{};
  // State of a summon_full_params scope.
  struct Hold {
    SummonFullParamsOptions options;
    bool here = true;                  // this rank has full parameters
    bool reads_only = false;           // nothing is written, and private copies stay as they are
    std::set<std::string> left_out{};  // names of units
    std::vector<at::Tensor> grads{};   // former grad(), by gradient of the reducer
  };
  std::optional<Hold> hold{};
  bool computes_shares = false;  // Elastic computes one share of the batch after the other
  int defer_depth = 0;           // nesting depth of defer_all_reduce scopes
  // Buffers and their original dtypes; empty: buffers were not converted.
  std::vector<std::pair<at::Tensor, at::ScalarType>> buffer_dtypes{};

  // Whether a summon_full_params scope holds the parameter in full on this rank.
  bool holds(const std::string& parameter) const;
  // Full value of a 16-bit parameter, from the float32 copies if it has some. Collective.
  at::Tensor assemble_exact(const at::Tensor& parameter, const std::string& name) const;
  // Assembles a parameter from what each rank writes to its own part of zeros, in memory order. Collective.
  at::Tensor assemble(const at::Tensor& parameter, at::ScalarType dtype, const std::string& name,
                      const std::function<void(const at::Tensor& flat)>& write_own) const;
  // The same from the pieces that `of` returns.
  at::Tensor assemble(const at::Tensor& parameter, at::ScalarType dtype, const std::string& name,
                      const std::function<at::Tensor(const OwnedPiece&)>& of) const;
  bool grad_op() const {
    return options.sharding_strategy == ShardingStrategy::shard_grad_op ||
           options.sharding_strategy == ShardingStrategy::hybrid_shard_grad_op;
  }
};

inline bool is_hybrid(ShardingStrategy strategy) {
  return strategy == ShardingStrategy::hybrid_shard || strategy == ShardingStrategy::hybrid_shard_grad_op;
}

std::string sharding_name(ShardingStrategy strategy);
// One line per option, for agree().
std::vector<std::string> describe(const FullyShardedDataParallelOptions& options);
// Name of a unit in labels and errors.
std::string title(const Unit& unit);

// Parameters in shared memory are always in memory, and so are those of a rank that shards with nobody.
inline bool always_present(const Group& shard, const ModuleTensors& tensors) {
  return shard.size() == 1 || (shard.transport() == "host" && tensors.parameters.front().tensor.is_cpu());
}

// Creates the group of ranks that share one copy of the model, and the group of ranks with equal shards. Collective.
ShardGroups make_shard_groups(const Group& group, const FullyShardedDataParallelOptions& options);

// Shards the parameters of `state` and creates its reducer. former: the frozen parameters, if they were sharded before
// in an elastic job. filled: parameters can be read; otherwise shards have any values, which the caller replaces.
// Collective.
void shard_parameters(DataParallelCore::State& state, FullyShardedCore::Shards& shards,
                      const std::vector<FullyShardedCore::Shards::Frozen>& former = {}, bool filled = true);

// DisagreeError if ranks that own the same ranges started with different values. Collective.
void require_equal_replicas(const DataParallelCore::State& state, FullyShardedCore::Shards& shards);

// "Half", or "none".
std::string name_of(const std::optional<at::ScalarType>& dtype);

}  // namespace shoal
