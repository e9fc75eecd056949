#pragma once
// Shards that ranks without common memory hold while they are divided anew.

#include <torch/optim/optimizer.h>

#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/loading/memory_source.h"
#include "engine/elastic/held_state.h"
#include "shoal/group.h"

namespace shoal {

// A rank's shards: elements of parameters, and the optimizer's state for them. A shard may be on several ranks. Tensors
// are shared with whoever updates them, in the memory in which they are when this object is made.
class ShardSource {
 public:
  struct Shard {
    std::string name;  // of the parameter, the same on all ranks
    UpdateTarget target;
    std::optional<NamedState> state;
    int owner = 0;  // with second owners: the first one
  };

  // None: of a rank that has come, and has nothing yet.
  ShardSource() = default;
  explicit ShardSource(std::vector<Shard> shards);

  const std::vector<Shard>& shards() const { return shards_; }
  // Owners of a shard may have other values: the program has written to parameters since the last update, which ranks
  // may have come to in part, and which it does again where they have not, in Elastic::together(). Otherwise they have
  // the same.
  void set_written(bool written) { written_ = written; }
  // Gives `wanted` its values, and `local`, which updates these, their state, from the sources of all ranks; from their
  // `otherwise`, unless that is nullptr, if no rank has some elements. JobLost that names the parameters of these, or
  // of which ranks have other values although nobody has written to parameters; UsageError for state that is not
  // element by element and would have to be cut. Collective.
  void fill(const Group& group, const std::vector<Shard>& wanted, torch::optim::Optimizer& local,
            const ShardSource* otherwise = nullptr) const;

 private:
  CheckpointContents contents() const;
  // Names of parameters of which no rank has some elements.
  std::set<std::string> lost(const Group& group, const std::vector<Shard>& wanted) const;

  std::vector<Shard> shards_{};
  bool written_ = false;
};

}  // namespace shoal
