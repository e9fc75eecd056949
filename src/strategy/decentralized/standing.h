#pragma once
// Progress of a rank's training besides its tensors: for checkpoints, and for a rank that rejoins.

#include <nlohmann/json.hpp>
#include <vector>

#include "strategy/decentralized/state.h"

namespace shoal {

struct Standing {
  std::vector<size_t> order{};  // of first arrival, numbers of gradients: buckets are built from it
  std::vector<int> arrivals{};  // by gradient: decides when a bucket is mixed
  int64_t step = 0;
  int64_t version = 0;         // shown last: with whom ranks mix
  std::vector<double> mass{};  // push-sum's, by bucket
  std::vector<KnownRanks::Entry> known{};
};

nlohmann::json to_json(const DecentralizedDataParallelCore::State& state);
// Throws nlohmann's exceptions for what to_json() does not write. Gradients that this model does not have are left out.
Standing parse_standing(const DecentralizedDataParallelCore::State& state, const nlohmann::json& text);

}  // namespace shoal
