#pragma once
// Gradients that groups of their own add up before the data-parallel reduction: of embeddings that pipeline stages
// share, of layer norms under sequence parallelism.

#include <string>
#include <vector>

#include "engine/sharded/sharded_ranges.h"

namespace shoal {

// A parameter by its module and its number there.
struct ChunkParameter {
  ShardedModule* chunk = nullptr;
  size_t gradient = 0;
  const Gradient& about() const { return chunk->reducer().gradients()[gradient]; }
};

class DeclaredGradients {
 public:
  // UsageError for a parameter that this group adds up already; DisagreeError unless the group's ranks declare
  // gradients of equal shapes. Collective over the group.
  void add(std::vector<ChunkParameter> parameters, const Group& group, const std::string& name);

  bool empty() const { return declared_.empty(); }
  // One that no rank of its group has used stays so; one that some rank has used counts as used on all of them, with
  // zeros from the others. `failed`: this rank cannot finish the step; returns whether that is so of any rank it met.
  // Collective over all groups.
  bool sum_up(const ShardedOptimizerCore::State& state, bool failed) const;

 private:
  struct Declared {
    std::vector<ChunkParameter> parameters;
    Group group;
    std::string what;
    std::string timer;
  };
  static bool sum_up(const Declared& declared, const Label& label, bool failed);

  std::vector<Declared> declared_;
};

}  // namespace shoal
