#pragma once
// What a world test knows about the world that its main has joined.

#include <gtest/gtest.h>

#include "shoal/world.h"

namespace shoal::test {

// The world of this process; joined once before the tests run.
const World& world();
inline const Group& group() {
  return world().group();
}

}  // namespace shoal::test
