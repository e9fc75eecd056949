#pragma once
// Progress of a rank's training besides its tensors, for checkpoints and for a rank that rejoins.

#include <nlohmann/json.hpp>
#include <vector>

#include "strategy/decentralized/state.h"

namespace shoal {

struct TrainingProgress {
  std::vector<size_t> order{};  // gradients in the order of their first arrival, from which buckets are built
  std::vector<int> arrivals{};  // by gradient: arrivals per backward, which decide when a bucket is mixed
  int64_t step = 0;
  int64_t version = 0;            // last version shown; decides with whom ranks mix
  std::vector<double> mass{};     // push-sum's weight, by bucket
  std::vector<size_t> members{};  // by bucket: number of its gradients; empty: not known
  std::vector<KnownRanks::Entry> known{};
  CommonScale::Recent scale{};  // with a scaler
};

nlohmann::json to_json(const DecentralizedDataParallelCore::State& state);
// Throws nlohmann::json's exceptions for what to_json() does not write. Ignores gradients that this model does not
// have.
TrainingProgress parse_progress(const DecentralizedDataParallelCore::State& state, const nlohmann::json& text);

}  // namespace shoal
