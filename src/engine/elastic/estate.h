#pragma once
// Shards that ranks without common memory hold while they are divided anew.

#include <torch/optim/optimizer.h>

#include <memory>
#include <string>
#include <vector>

#include "checkpoint/loading/memory_source.h"
#include "engine/elastic/held_state.h"
#include "shoal/group.h"

namespace shoal {

// A rank's shards: elements of parameters, and the optimizer's state for them. A shard may be on several ranks.
class Estate {
 public:
  struct Shard {
    std::string name;  // of the parameter, the same on all ranks
    UpdateTarget target;
  };

  // local: the optimizer that updates the shards' values.
  Estate(std::vector<Shard> shards, std::shared_ptr<torch::optim::Optimizer> local)
      : shards_(std::move(shards)), local_(std::move(local)) {}

  const std::vector<Shard>& shards() const { return shards_; }
  // The optimizer's state for each of them.
  std::vector<NamedState> states() const;
  // The program has written to parameters since the last update, which ranks may have come to in part: it does so again where ranks
  // have not, in Elastic::together(). Otherwise the owners of a shard have the same.
  void set_written(bool written) { written_ = written; }
  // Gives `wanted` its values and its state, from the estates of all ranks. JobLost that names parameters of which no rank has some
  // elements, or of which ranks have other values although nobody has written to parameters; UsageError for state that is not element by element and would have to be cut. Collective.
  void fill(const Group& group, const Estate& wanted) const;

 private:
  CheckpointContents contents() const;
  void require_complete(const Group& group, const Estate& wanted) const;
  void read(MemorySource& source) const;

  std::vector<Shard> shards_;
  std::shared_ptr<torch::optim::Optimizer> local_;
  bool written_ = false;
};

}  // namespace shoal
