#pragma once
// Second owners of shards, in elastic jobs whose ranks share no memory.

#include <cstdint>
#include <optional>
#include <vector>

#include "engine/elastic/shard_source.h"

namespace shoal {

// By rank, the second owner of what the rank owns: the rank at its place on the next host, counted round where that
// has fewer ranks; with one host, the next rank. hosts: by rank, as returned by hosts_of(). Several ranks at least.
std::vector<int> choose_second_owners(const std::vector<int>& hosts);

// What a rank knows of divisions of the shards among first and second owners. A second owner has its own copy of the
// shard and of its state, and makes the same updates. So a rank that has all gradients can finish its step alone, and
// no rank's end takes a shard along.
struct SecondOwners {
  static constexpr int64_t none = -1;  // of a rank that has come, and has had no shards yet

  int64_t sealed = 0;                   // number of the division of shards that all ranks have come to
  int64_t made = 0;                     // of one that is complete here, and may have been sealed elsewhere
  int64_t tries = 0;                    // number of the present one; no two have the same
  bool comes = false;                   // this rank has come, and no division with it has been sealed yet
  bool grows = false;                   // it gives shards to ranks that have come
  std::optional<ShardSource> former{};  // what counts while another division is made
  // That of before ranks came, until a step is complete: they may fail in it together, and take along both owners of a
  // shard.
  std::optional<ShardSource> before{};
  std::vector<ShardSource::Shard> updated{};  // this rank's, after the last step
};

}  // namespace shoal
