// Shards of a DistributedSampler: together they are the epoch, padded, cut or as it is.

#include <gtest/gtest.h>

#include <string>

#include "tests/loop/sampler_epochs.h"

namespace shoal::sampler_shards_test {
namespace {

using namespace sampler_epochs;

struct Case {
  size_t size;
  size_t world;
};

class Sharding : public testing::TestWithParam<Case> {};

TEST_P(Sharding, padding_covers_everything_in_equal_shards) {
  const auto [size, world] = GetParam();
  const auto shards = shards_of(size, world, Options{});
  for (const auto& shard : shards) EXPECT_EQ(shard.size(), (size + world - 1) / world);
  const auto all = interleave(shards);
  EXPECT_EQ(distinct(all).size(), size);
  EXPECT_EQ(*distinct(all).rbegin(), size - 1);
  // What is taken twice is the beginning of the epoch's order.
  for (size_t i = size; i < all.size(); ++i) EXPECT_EQ(all[i], all[i % size]);
}

TEST_P(Sharding, drop_last_never_takes_a_sample_twice) {
  const auto [size, world] = GetParam();
  const auto shards = shards_of(size, world, drop);
  for (const auto& shard : shards) EXPECT_EQ(shard.size(), size / world);
  EXPECT_EQ(distinct(interleave(shards)).size(), size / world * world);
}

TEST_P(Sharding, without_padding_every_sample_is_taken_once) {
  const auto [size, world] = GetParam();
  const auto all = interleave(shards_of(size, world, keep));
  EXPECT_EQ(all.size(), size);
  EXPECT_EQ(distinct(all).size(), size);
}

TEST_P(Sharding, all_worlds_share_one_order_of_an_epoch) {
  const auto [size, world] = GetParam();
  for (const size_t epoch : {0, 1, 5}) {
    EXPECT_EQ(interleave(shards_of(size, world, keep, epoch)), epoch_of(size, epoch));
  }
}

// What evaluations count.
TEST_P(Sharding, unpadded_samples_come_first_and_are_all_samples_once) {
  const auto [size, world] = GetParam();
  for (const auto& options : {Options{}, keep, drop}) {
    Indices counted;
    for (size_t rank = 0; rank < world; ++rank) {
      DistributedSampler sampler(size, world, rank, options);
      ASSERT_LE(sampler.unpadded(), sampler.num_samples());
      const auto shard = drain(sampler);
      counted.insert(counted.end(), shard.begin(), shard.begin() + static_cast<std::ptrdiff_t>(sampler.unpadded()));
    }
    EXPECT_EQ(distinct(counted).size(), counted.size());
    EXPECT_EQ(counted.size(), options.drop_last ? size / world * world : size);
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, Sharding,
                         testing::Values(Case{12, 1}, Case{13, 1}, Case{12, 2}, Case{13, 2}, Case{12, 3}, Case{13, 3},
                                         Case{14, 3}, Case{12, 4}, Case{13, 4}, Case{15, 4}, Case{1, 4}, Case{3, 4}),
                         [](const auto& info) {
                           return "Size" + std::to_string(info.param.size) + "World" + std::to_string(info.param.world);
                         });

TEST(DistributedSampler, drops_other_samples_in_other_epochs) {
  std::set<size_t> seen;
  for (size_t epoch = 0; epoch < 20; ++epoch) {
    seen.merge(distinct(interleave(shards_of(11, 4, drop, epoch))));
  }
  EXPECT_EQ(seen.size(), 11U);
}

}  // namespace
}  // namespace shoal::sampler_shards_test
