#pragma once
// Access to the world that a world test's main has joined.

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "shoal/world.h"

namespace shoal::test {

// World of this process, joined once before the tests run.
const World& world();
inline const Group& group() {
  return world().group();
}

// New group of all ranks, which the test may break. Collective.
inline Group fresh_group() {
  std::vector<int> everyone(static_cast<size_t>(world().size()));
  std::iota(everyone.begin(), everyone.end(), 0);
  return group().subgroup(everyone);
}

}  // namespace shoal::test
