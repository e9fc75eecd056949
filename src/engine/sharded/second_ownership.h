#pragma once
// State of a rank's second ownership: the present division of shards, and the next one.

#include <optional>
#include <vector>

#include "engine/elastic/estate.h"

namespace shoal {

struct SecondOwnership {
  static constexpr int64_t none = -1;  // of a rank that has come, and has had no shards yet

  int64_t sealed = 0;              // number of the division of shards that all ranks have come to
  int64_t made = 0;                // of one that is complete here, and may have been sealed elsewhere
  int64_t tries = 0;               // number of the present one; no two have the same
  bool comes = false;              // this rank has come, and no division with it has been sealed yet
  bool grows = false;              // it gives shards to ranks that have come
  std::optional<Estate> former{};  // what counts while another division is made
  // That of before ranks came, until a step is complete: they may fail in it together, and take along both owners of a
  // shard.
  std::optional<Estate> before{};
  std::vector<Estate::Shard> updated{};  // this rank's, after the last step
};

}  // namespace shoal
