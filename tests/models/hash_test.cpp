// Hash compared with vectors that the Python definition prints.

#include "models/hash.h"

#include <gtest/gtest.h>

#include "models/hash_tensor.h"

namespace shoal::models {
namespace {

TEST(Hash, mixes_as_the_definition) {
  EXPECT_EQ(mix(0), 0xe220a8397b1dcdafu);
}

TEST(Hash, folds_a_key_as_the_definition) {
  EXPECT_EQ(key(1, 2, 3), 0xd0734750fde362b3u);
  EXPECT_NE(key(1, 2, 3), key(1, 3, 2));
  EXPECT_EQ(key(1, Purpose::sample, 3), key(1, 2, 3));
}

TEST(Hash, draws_as_the_definition) {
  EXPECT_EQ(draw(key(1, 2, 3), 0), 0x12588d809dce88a7u);
  EXPECT_EQ(draw(key(1, 2, 3), 1), 0x17bc5bf708d873d6u);
  EXPECT_EQ(draw(key(1, 2, 3), 2), 0x63819c0db6629c72u);
}

TEST(Hash, unit_stays_below_one) {
  EXPECT_EQ(unit(0), -1.0f);
  EXPECT_EQ(unit(~uint64_t{0}), 1.0f - 0x1p-23f);
  EXPECT_EQ(unit(uint64_t{1} << 63), 0.0f);
}

TEST(Hash, tensor_holds_the_stream) {
  const auto values = unit_tensor(key(1, 2, 3), 200000);  // more than one thread's share
  EXPECT_EQ(values.scalar_type(), at::kFloat);
  EXPECT_FLOAT_EQ(values[0].item<float>(), -0.856672645f);
  EXPECT_FLOAT_EQ(values[1].item<float>(), -0.814564347f);
  EXPECT_FLOAT_EQ(values[2].item<float>(), -0.222607136f);
  EXPECT_EQ(values[199999].item<float>(), unit(draw(key(1, 2, 3), 199999)));
  EXPECT_EQ(unit_tensor(0, 0).numel(), 0);
}

}  // namespace
}  // namespace shoal::models
