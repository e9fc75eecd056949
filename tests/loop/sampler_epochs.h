#pragma once
// The samples that a DistributedSampler gives in an epoch, of one rank or of all.

#include <optional>
#include <set>
#include <vector>

#include "shoal/data.h"

namespace shoal::sampler_epochs {

using Indices = std::vector<size_t>;

using Options = DistributedSamplerOptions;
inline const Options keep{.pad = false};
inline const Options drop{.drop_last = true};

inline Indices drain(DistributedSampler& sampler, size_t batch_size = 2) {
  Indices all;
  while (const auto batch = sampler.next(batch_size)) all.insert(all.end(), batch->begin(), batch->end());
  return all;
}

inline Indices epoch_of(size_t size, size_t epoch = 0, const Options& options = {}, size_t ranks = 1, size_t rank = 0) {
  DistributedSampler sampler(size, ranks, rank, options);
  sampler.set_epoch(epoch);
  sampler.reset();
  return drain(sampler);
}

inline std::vector<Indices> shards_of(size_t size, size_t ranks, const Options& options, size_t epoch = 0) {
  std::vector<Indices> shards;
  for (size_t rank = 0; rank < ranks; ++rank) shards.push_back(epoch_of(size, epoch, options, ranks, rank));
  return shards;
}

// The order that the ranks share: one sample of each in turn.
inline Indices interleave(const std::vector<Indices>& shards) {
  Indices all;
  for (size_t i = 0; i < shards[0].size(); ++i) {
    for (const auto& shard : shards) {
      if (i < shard.size()) all.push_back(shard[i]);
    }
  }
  return all;
}

inline std::set<size_t> distinct(const Indices& indices) {
  return {indices.begin(), indices.end()};
}

}  // namespace shoal::sampler_epochs
