#pragma once
// Access to the world that a world test's main has joined.

#include <gtest/gtest.h>

#include "shoal/world.h"

namespace shoal::test {

// World of this process, joined once before the tests run.
const World& world();
inline const Group& group() {
  return world().group();
}

}  // namespace shoal::test
