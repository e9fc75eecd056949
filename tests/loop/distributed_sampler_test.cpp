// Order and place of a DistributedSampler: by epoch and seed, saved and loaded. Shards are in sampler_shards_test.cpp,
// data loaders in sampler_loader_test.cpp, changes of the ranks in sampler_division_test.cpp.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/serialize.h>
#include <torch/types.h>

#include <sstream>

#include "shoal/error.h"
#include "tests/loop/sampler_epochs.h"

namespace shoal::distributed_sampler_test {
namespace {

using namespace sampler_epochs;

TEST(DistributedSampler, differs_by_epoch_and_seed) {
  const auto first = epoch_of(100, 0);
  EXPECT_EQ(epoch_of(100, 0), first);
  EXPECT_NE(epoch_of(100, 1), first);
  EXPECT_NE(epoch_of(100, 0, {.seed = 7}), first);
}

// The expected indices are those of torch.utils.data.distributed.DistributedSampler.
TEST(DistributedSampler, matches_pythons_sampler) {
  EXPECT_EQ(epoch_of(11), Indices({10, 0, 4, 3, 5, 8, 2, 1, 9, 7, 6}));
  EXPECT_EQ(epoch_of(11, 2, {.seed = 5}, 3, 1), Indices({0, 5, 10, 6}));
  EXPECT_EQ(epoch_of(11, 1, drop, 4, 3), Indices({3, 8}));
}

TEST(DistributedSampler, keeps_the_order_of_the_data_without_shuffle) {
  EXPECT_EQ(epoch_of(7, 3, {.shuffle = false}), Indices({0, 1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(epoch_of(7, 0, {.shuffle = false, .pad = false}, 2, 1), Indices({1, 3, 5}));
}

TEST(DistributedSampler, gives_a_shorter_last_batch) {
  DistributedSampler sampler(7, 1, 0, {.shuffle = false});
  sampler.next(4);
  EXPECT_EQ(sampler.next(4), Indices({4, 5, 6}));
  EXPECT_EQ(sampler.next(4), std::nullopt);
  sampler.reset();
  EXPECT_EQ(sampler.next(4), Indices({0, 1, 2, 3}));
}

TEST(DistributedSampler, goes_on_where_it_was_saved) {
  DistributedSampler sampler(20, 2, 1);
  sampler.set_epoch(3);
  sampler.reset();
  sampler.next(4);
  std::stringstream stream;
  torch::serialize::OutputArchive out;
  sampler.save(out);
  out.save_to(stream);

  DistributedSampler resumed(20, 2, 1);
  torch::serialize::InputArchive in;
  in.load_from(stream);
  resumed.load(in);
  EXPECT_EQ(resumed.epoch(), 3U);
  EXPECT_EQ(resumed.index(), 4U);
  EXPECT_EQ(drain(resumed), drain(sampler));
}

// What is saved between two epochs is the beginning of the next one.
TEST(DistributedSampler, an_epoch_that_has_not_begun_is_saved_as_such) {
  DistributedSampler sampler(20, 2, 1);
  drain(sampler);
  sampler.set_epoch(1);
  for (const size_t seeks : {0, 4}) {
    if (seeks > 0) sampler.seek(seeks);
    std::stringstream stream;
    torch::serialize::OutputArchive out;
    sampler.save(out);
    out.save_to(stream);
    DistributedSampler resumed(20, 2, 1);
    torch::serialize::InputArchive in;
    in.load_from(stream);
    resumed.load(in);
    EXPECT_EQ(resumed.epoch(), 1U);
    const auto all = epoch_of(20, 1, {}, 2, 1);
    EXPECT_EQ(drain(resumed), Indices(all.begin() + static_cast<std::ptrdiff_t>(seeks), all.end()));
  }
}

TEST(DistributedSampler, seeks_within_its_samples) {
  DistributedSampler sampler(20, 2, 1);
  const auto all = drain(sampler);
  sampler.seek(6);
  EXPECT_EQ(drain(sampler), Indices(all.begin() + 6, all.end()));
  EXPECT_EQ(sampler.num_samples(), 10U);
  EXPECT_THAT([&] { sampler.seek(12); },
              testing::ThrowsMessage<UsageError>(testing::HasSubstr("seek(min(batches_done * batch_size, 10))")));
  sampler.seek(10);
  EXPECT_EQ(sampler.next(2), std::nullopt) << "the end of the epoch";
  sampler.set_epoch(1);
  EXPECT_EQ(drain(sampler).size(), 10U);
}

TEST(DistributedSampler, next_begins_the_epoch_that_set_epoch_has_named) {
  DistributedSampler sampler(20, 2, 1);
  for (const size_t epoch : {1, 2, 0}) {
    sampler.set_epoch(epoch);
    EXPECT_EQ(drain(sampler), epoch_of(20, epoch, {}, 2, 1));
    EXPECT_EQ(sampler.index(), 10U);
    EXPECT_EQ(sampler.next(2), std::nullopt);
  }
}

TEST(DistributedSampler, a_copy_hears_its_sampler_until_it_is_told_its_own_epoch) {
  DistributedSampler sampler(20, 2, 1);
  auto copy = sampler, own = sampler, alone = sampler.clone();
  auto of_own = own;
  own.set_epoch(7);
  sampler.set_epoch(3);
  for (const auto& [one, epoch] : {std::pair(&copy, 3), {&own, 7}, {&of_own, 7}, {&alone, 0}, {&sampler, 3}}) {
    one->reset();
    EXPECT_EQ(one->epoch(), static_cast<size_t>(epoch));
    EXPECT_EQ(drain(*one), epoch_of(20, static_cast<size_t>(epoch), {}, 2, 1));
  }
}

TEST(DistributedSampler, takes_a_new_size_on_reset) {
  DistributedSampler sampler(20, 1, 0);
  sampler.reset(5);
  EXPECT_EQ(distinct(drain(sampler)), std::set<size_t>({0, 1, 2, 3, 4}));
}

TEST(DistributedSampler, refuses_impossible_options) {
  EXPECT_THROW(DistributedSampler(0, 1, 0), UsageError);
  EXPECT_THROW(DistributedSampler(4, 2, 2), UsageError);
  EXPECT_THROW(DistributedSampler(4, 0, 0), UsageError);
  EXPECT_THROW(DistributedSampler(4, 2, 0, {.drop_last = true, .pad = false}), UsageError);
}

TEST(DistributedSampler, a_refused_load_changes_nothing) {
  DistributedSampler sampler(20, 2, 1);
  std::stringstream stream;
  torch::serialize::OutputArchive out;
  DistributedSampler larger(800, 2, 1);
  larger.set_epoch(4);
  larger.seek(400);
  larger.save(out);
  out.save_to(stream);
  torch::serialize::InputArchive in;
  in.load_from(stream);
  EXPECT_THROW(sampler.load(in), UsageError);
  EXPECT_EQ(sampler.epoch(), 0U);
  EXPECT_EQ(drain(sampler), epoch_of(20, 0, {}, 2, 1));
}

}  // namespace
}  // namespace shoal::distributed_sampler_test
