#include "data/sharded_sampler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/serialize.h>
#include <torch/types.h>

#include <numeric>
#include <set>
#include <sstream>

#include "shoal/error.h"

namespace shoal::data {
namespace {

using Indices = std::vector<size_t>;

Indices drain(ShardedSampler& sampler, size_t batch_size = 2) {
  Indices all;
  while (const auto batch = sampler.next(batch_size)) all.insert(all.end(), batch->begin(), batch->end());
  return all;
}

Indices epoch_of(size_t size, const SamplerOptions& options, size_t epoch = 0) {
  ShardedSampler sampler(size, options);
  sampler.set_epoch(epoch);
  sampler.reset();
  return drain(sampler);
}

std::vector<Indices> shards_of(size_t size, size_t world, Remainder remainder, size_t epoch = 0) {
  std::vector<Indices> shards;
  for (size_t rank = 0; rank < world; ++rank) {
    shards.push_back(epoch_of(size, {.world = world, .rank = rank, .remainder = remainder}, epoch));
  }
  return shards;
}

// The order that ranks share: one sample of each rank in turn.
Indices interleave(const std::vector<Indices>& shards) {
  Indices all;
  for (size_t i = 0; i < shards[0].size(); ++i) {
    for (const auto& shard : shards) {
      if (i < shard.size()) all.push_back(shard[i]);
    }
  }
  return all;
}

std::set<size_t> distinct(const Indices& indices) {
  return {indices.begin(), indices.end()};
}

struct Case {
  size_t size;
  size_t world;
};

class Sharding : public testing::TestWithParam<Case> {};

TEST_P(Sharding, wrap_covers_everything_in_equal_shards) {
  const auto [size, world] = GetParam();
  const auto shards = shards_of(size, world, Remainder::wrap);
  for (const auto& shard : shards) EXPECT_EQ(shard.size(), (size + world - 1) / world);
  const auto all = interleave(shards);
  EXPECT_EQ(distinct(all).size(), size);
  EXPECT_EQ(*distinct(all).rbegin(), size - 1);
  // Samples used twice are the first ones of the epoch's order.
  for (size_t i = size; i < all.size(); ++i) EXPECT_EQ(all[i], all[i % size]);
}

TEST_P(Sharding, drop_never_takes_a_sample_twice) {
  const auto [size, world] = GetParam();
  const auto shards = shards_of(size, world, Remainder::drop);
  for (const auto& shard : shards) EXPECT_EQ(shard.size(), size / world);
  EXPECT_EQ(distinct(interleave(shards)).size(), size / world * world);
}

TEST_P(Sharding, keep_takes_every_sample_once) {
  const auto [size, world] = GetParam();
  const auto all = interleave(shards_of(size, world, Remainder::keep));
  EXPECT_EQ(all.size(), size);
  EXPECT_EQ(distinct(all).size(), size);
}

TEST_P(Sharding, all_worlds_share_one_order_of_an_epoch) {
  const auto [size, world] = GetParam();
  for (const size_t epoch : {0, 1, 5}) {
    EXPECT_EQ(interleave(shards_of(size, world, Remainder::keep, epoch)), epoch_of(size, {}, epoch));
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, Sharding,
                         testing::Values(Case{12, 1}, Case{13, 1}, Case{12, 2}, Case{13, 2}, Case{12, 3}, Case{13, 3},
                                         Case{14, 3}, Case{12, 4}, Case{13, 4}, Case{15, 4}, Case{1, 4}, Case{3, 4}),
                         [](const auto& info) {
                           return "Size" + std::to_string(info.param.size) + "World" + std::to_string(info.param.world);
                         });

TEST(ShardedSampler, differs_by_epoch_and_seed) {
  const auto first = epoch_of(100, {}, 0);
  EXPECT_EQ(epoch_of(100, {}, 0), first);
  EXPECT_NE(epoch_of(100, {}, 1), first);
  EXPECT_NE(epoch_of(100, {.seed = 7}, 0), first);
}

TEST(ShardedSampler, drops_other_samples_in_other_epochs) {
  std::set<size_t> seen;
  for (size_t epoch = 0; epoch < 20; ++epoch) {
    seen.merge(distinct(interleave(shards_of(11, 4, Remainder::drop, epoch))));
  }
  EXPECT_EQ(seen.size(), 11u);
}

// The expected indices are those of torch.utils.data.distributed.DistributedSampler.
TEST(ShardedSampler, matches_pythons_sampler) {
  EXPECT_EQ(epoch_of(11, {}), Indices({10, 0, 4, 3, 5, 8, 2, 1, 9, 7, 6}));
  EXPECT_EQ(epoch_of(11, {.world = 3, .rank = 1, .seed = 5}, 2), Indices({0, 5, 10, 6}));
  EXPECT_EQ(epoch_of(11, {.world = 4, .rank = 3, .remainder = Remainder::drop}, 1), Indices({3, 8}));
}

TEST(ShardedSampler, keeps_the_order_of_the_data_when_sequential) {
  EXPECT_EQ(epoch_of(7, {.order = Order::sequential}, 3), Indices({0, 1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(epoch_of(7, {.world = 2, .rank = 1, .order = Order::sequential, .remainder = Remainder::keep}),
            Indices({1, 3, 5}));
}

TEST(ShardedSampler, gives_a_shorter_last_batch) {
  ShardedSampler sampler(7, {.order = Order::sequential});
  sampler.next(4);
  EXPECT_EQ(sampler.next(4), Indices({4, 5, 6}));
  EXPECT_EQ(sampler.next(4), std::nullopt);
  sampler.reset();
  EXPECT_EQ(sampler.next(4), Indices({0, 1, 2, 3}));
}

TEST(ShardedSampler, goes_on_where_it_was_saved) {
  ShardedSampler sampler(20, {.world = 2, .rank = 1});
  sampler.set_epoch(3);
  sampler.reset();
  sampler.next(4);
  std::stringstream stream;
  torch::serialize::OutputArchive out;
  sampler.save(out);
  out.save_to(stream);

  ShardedSampler resumed(20, {.world = 2, .rank = 1});
  torch::serialize::InputArchive in;
  in.load_from(stream);
  resumed.load(in);
  EXPECT_EQ(resumed.epoch(), 3u);
  EXPECT_EQ(resumed.index(), 4u);
  EXPECT_EQ(drain(resumed), drain(sampler));
}

TEST(ShardedSampler, seeks_within_its_shard) {
  ShardedSampler sampler(20, {.world = 2, .rank = 1});
  const auto all = drain(sampler);
  sampler.seek(6);
  EXPECT_EQ(drain(sampler), Indices(all.begin() + 6, all.end()));
  EXPECT_EQ(sampler.local_size(), 10u);
  EXPECT_THROW(sampler.seek(11), UsageError);
}

TEST(ShardedSampler, takes_a_new_size_on_reset) {
  ShardedSampler sampler(20, {});
  sampler.reset(5);
  EXPECT_EQ(distinct(drain(sampler)), std::set<size_t>({0, 1, 2, 3, 4}));
}

TEST(ShardedSampler, refuses_impossible_options) {
  EXPECT_THROW(ShardedSampler(0, {}), UsageError);
  EXPECT_THROW(ShardedSampler(4, {.world = 2, .rank = 2}), UsageError);
  EXPECT_THROW(ShardedSampler(4, {.world = 0}), UsageError);
}

}  // namespace
}  // namespace shoal::data
