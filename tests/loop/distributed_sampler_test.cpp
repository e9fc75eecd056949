#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/data.h>
#include <torch/serialize.h>
#include <torch/types.h>

#include <numeric>
#include <set>
#include <sstream>

#include "shoal/data.h"
#include "shoal/error.h"

namespace shoal {
namespace {

using Indices = std::vector<size_t>;

using Options = DistributedSamplerOptions;
const Options keep{.pad = false};
const Options drop{.drop_last = true};

Indices drain(DistributedSampler& sampler, size_t batch_size = 2) {
  Indices all;
  while (const auto batch = sampler.next(batch_size)) all.insert(all.end(), batch->begin(), batch->end());
  return all;
}

Indices epoch_of(size_t size, size_t epoch = 0, const Options& options = {}, size_t ranks = 1, size_t rank = 0) {
  DistributedSampler sampler(size, ranks, rank, options);
  sampler.set_epoch(epoch);
  sampler.reset();
  return drain(sampler);
}

std::vector<Indices> shards_of(size_t size, size_t ranks, const Options& options, size_t epoch = 0) {
  std::vector<Indices> shards;
  for (size_t rank = 0; rank < ranks; ++rank) shards.push_back(epoch_of(size, epoch, options, ranks, rank));
  return shards;
}

// The order that the ranks share: one sample of each in turn.
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

TEST(DistributedSampler, differs_by_epoch_and_seed) {
  const auto first = epoch_of(100, 0);
  EXPECT_EQ(epoch_of(100, 0), first);
  EXPECT_NE(epoch_of(100, 1), first);
  EXPECT_NE(epoch_of(100, 0, {.seed = 7}), first);
}

TEST(DistributedSampler, drops_other_samples_in_other_epochs) {
  std::set<size_t> seen;
  for (size_t epoch = 0; epoch < 20; ++epoch) {
    seen.merge(distinct(interleave(shards_of(11, 4, drop, epoch))));
  }
  EXPECT_EQ(seen.size(), 11U);
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

// Its elements are their own indices.
struct Counting : torch::data::datasets::BatchDataset<Counting, Indices> {
  Indices get_batch(c10::ArrayRef<size_t> indices) override { return indices.vec(); }
  std::optional<size_t> size() const override { return 20; }
};

auto loader_of(const DistributedSampler& sampler, size_t workers = 0) {
  return torch::data::make_data_loader(Counting(), sampler, torch::data::DataLoaderOptions(3).workers(workers));
}

Indices pass_of(decltype(*loader_of(std::declval<DistributedSampler>())) loader) {
  Indices all;
  for (const Indices& batch : loader) all.insert(all.end(), batch.begin(), batch.end());
  return all;
}

Indices served(const DistributedSampler& sampler, size_t workers) {
  return pass_of(*loader_of(sampler, workers));
}

TEST(DistributedSampler, a_data_loader_resumes_in_the_middle_of_an_epoch) {
  for (const size_t workers : {0, 2}) {
    DistributedSampler sampler(20, 2, 1, {.seed = 3});
    sampler.set_epoch(2);
    const auto whole = served(sampler, workers);
    ASSERT_EQ(whole.size(), 10U);
    DistributedSampler resumed(20, 2, 1, {.seed = 3});
    resumed.set_epoch(2);
    resumed.seek(6);
    EXPECT_EQ(served(resumed, workers), Indices(whole.begin() + 6, whole.end()));
    resumed.set_epoch(3);
    sampler.set_epoch(3);
    EXPECT_EQ(served(resumed, workers), served(sampler, workers)) << "the next epoch is whole";
  }
}

// Loops without shuffle have no reason to name epochs.
TEST(DistributedSampler, passes_after_that_of_seek_are_whole_without_set_epoch) {
  DistributedSampler sampler(20, 2, 1, {.shuffle = false});
  const auto whole = drain(sampler);
  const Indices rest(whole.begin() + 6, whole.end());
  for (const bool one_loader : {true, false}) {
    sampler.seek(6);
    const auto loader = loader_of(sampler);
    loader->begin();  // a look at the first batch
    EXPECT_EQ(one_loader ? pass_of(*loader) : served(sampler, 2), rest);
    EXPECT_EQ(sampler.left(), 10U);
    for (int i = 0; i < 2; ++i) EXPECT_EQ(one_loader ? pass_of(*loader) : served(sampler, 0), whole);
  }
  sampler.seek(6);
  for (const auto& expected : {rest, whole, whole}) {  // no loader
    EXPECT_EQ(drain(sampler), expected);
    sampler.reset();
  }
}

TEST(DistributedSampler, a_loader_made_once_takes_the_epochs_and_places_that_are_named_later) {
  for (const size_t workers : {0, 2}) {
    DistributedSampler sampler(20, 2, 1, {.seed = 3});
    const auto loader = loader_of(sampler, workers);
    const auto epoch = [](size_t number) { return epoch_of(20, number, {.seed = 3}, 2, 1); };
    sampler.set_epoch(2);
    sampler.seek(6);
    const auto second = epoch(2);
    EXPECT_EQ(pass_of(*loader), Indices(second.begin() + 6, second.end()));
    EXPECT_EQ(pass_of(*loader), second);
    for (const size_t number : {3, 4}) {
      sampler.set_epoch(number);
      EXPECT_EQ(pass_of(*loader), epoch(number));
    }
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

TEST(DistributedSampler, counts_what_a_data_loader_takes) {
  for (const auto& options : {Options{}, keep, drop}) {
    DistributedSampler sampler(21, 2, 1, options);
    const auto expect_left = [&] {
      const auto left = sampler.left();
      EXPECT_EQ(left, served(sampler, 0).size());
    };
    expect_left();
    sampler.seek(6);
    expect_left();
    sampler.divide(3, 1, 7);
    expect_left();
    sampler.divide_shares(4, 2, 1, 2, 5);
    expect_left();
    sampler.set_epoch(1);
    expect_left();
  }
}

TEST(DistributedSampler, other_options_count_from_the_place_of_the_epoch) {
  DistributedSampler sampler(21, 2, 1, {.seed = 3});
  DistributedSampler other(21, 2, 1, {.seed = 4, .drop_last = true});
  for (auto* one : {&sampler, &other}) {
    one->set_epoch(2);
    one->seek(6);
  }
  sampler.set_options(other.options());
  EXPECT_EQ(served(sampler, 0), served(other, 0));
  EXPECT_EQ(sampler.taken(), other.taken());
  EXPECT_EQ(drain(sampler), drain(other));
  sampler.set_epoch(3);
  other.set_epoch(3);
  EXPECT_EQ(served(sampler, 0), served(other, 0));
  EXPECT_THROW(sampler.set_options({.drop_last = true, .pad = false}), UsageError);
}

TEST(DistributedSampler, refuses_impossible_options) {
  EXPECT_THROW(DistributedSampler(0, 1, 0), UsageError);
  EXPECT_THROW(DistributedSampler(4, 2, 2), UsageError);
  EXPECT_THROW(DistributedSampler(4, 0, 0), UsageError);
  EXPECT_THROW(DistributedSampler(4, 2, 0, {.drop_last = true, .pad = false}), UsageError);
}

// The samples that ranks take in an epoch whose division changes: 4 ranks, then 3, then 1.
TEST(DistributedSampler, ELA01_every_sample_once_whatever_the_number_of_ranks) {
  for (const size_t size : {7U, 40U, 101U}) {
    Indices seen;
    size_t taken = 0;
    for (const size_t ranks : {4U, 3U, 1U}) {
      std::vector<DistributedSampler> copies;  // as data loaders make them
      for (size_t rank = 0; rank < ranks; ++rank) {
        DistributedSampler sampler(size, 4, 0, {.seed = 5});
        sampler.set_epoch(2);
        sampler.divide(ranks, rank, taken);
        copies.push_back(sampler);
        copies.back().reset();
      }
      for (int step = 0; ranks == 1 || step < 2; ++step) {
        Indices of_step;
        for (auto& copy : copies) {
          const auto batch = copy.next(3);
          if (batch) of_step.insert(of_step.end(), batch->begin(), batch->end());
        }
        if (of_step.empty()) break;
        seen.insert(seen.end(), of_step.begin(), of_step.end());
      }
      taken = copies[0].taken();
    }
    EXPECT_EQ(distinct(seen).size(), size);
    EXPECT_LT(seen.size(), size + 4) << "only the last division is padded";
  }
}

TEST(DistributedSampler, ELA01_a_division_concerns_its_epoch_alone) {
  DistributedSampler sampler(10, 2, 0, {.seed = 5});
  sampler.divide(1, 0, 6);
  sampler.reset();
  EXPECT_EQ(sampler.num_samples(), 4U);
  EXPECT_EQ(sampler.taken(), 6U);
  sampler.set_epoch(1);
  EXPECT_EQ(sampler.taken(), 0U);
  sampler.reset();
  EXPECT_EQ(sampler.num_samples(), 10U);
  EXPECT_THROW(sampler.divide(2, 2), UsageError);
}

TEST(DistributedSampler, ELA01_seeks_within_a_division_that_has_begun) {
  DistributedSampler sampler(12, 2, 0, {.shuffle = false});
  sampler.divide(2, 0, 6);
  sampler.reset();
  EXPECT_EQ(sampler.next(1), Indices({6}));
  sampler.seek(1);
  EXPECT_EQ(sampler.next(1), Indices({8}));
  EXPECT_THROW(sampler.seek(4), UsageError);
  EXPECT_EQ(sampler.next(1), Indices({10})) << "what is refused changes nothing";
}

TEST(DistributedSampler, ELA01_counts_are_those_of_the_present_epoch_before_it_begins) {
  for (const auto& options : {Options{}, keep, drop}) {
    for (const size_t rank : {0U, 1U}) {
      const DistributedSampler whole(13, 3, rank, options);
      DistributedSampler sampler(13, 2, 0, options);
      for (const bool stands_in : {false, true}) {
        sampler.set_epoch(0);
        stands_in ? sampler.divide_shares(3, 2, rank, 2, 6) : sampler.divide(3, rank, 6);
        sampler.next(1);
        sampler.set_epoch(1);
        auto begun = sampler;
        begun.reset();
        EXPECT_EQ(sampler.num_samples(), drain(begun).size());
        EXPECT_EQ(sampler.unpadded(), begun.unpadded());
        EXPECT_EQ(sampler.index(), 0U);
        if (stands_in) continue;
        EXPECT_EQ(sampler.num_samples(), whole.num_samples());
        EXPECT_EQ(sampler.unpadded(), whole.unpadded());
      }
    }
  }
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

TEST(DistributedSampler, ELA01_a_division_is_saved_and_loaded) {
  DistributedSampler sampler(20, 2, 1, {.seed = 5});
  sampler.set_epoch(3);
  sampler.divide(2, 1, 6);
  sampler.seek(2);
  std::stringstream stream;
  torch::serialize::OutputArchive out;
  sampler.save(out);
  out.save_to(stream);
  torch::serialize::InputArchive in;
  in.load_from(stream);
  DistributedSampler other(20, 2, 1, {.seed = 5});
  other.load(in);
  EXPECT_EQ(other.taken(), sampler.taken());
  EXPECT_EQ(drain(other), drain(sampler));
}

// Two ranks for five, and later one: a step has the samples that it has with five ranks.
TEST(DistributedSampler, ELA05_ranks_that_stand_in_for_others_take_the_same_steps) {
  constexpr size_t all = 5, batch = 3;
  for (const auto& options : {Options{.seed = 4}, Options{.seed = 4, .drop_last = true}}) {
    for (const size_t ranks : {size_t{2}, size_t{1}}) {
      for (const size_t taken : {size_t{0}, all * batch}) {
        std::vector<DistributedSampler> whole, few;
        for (size_t rank = 0; rank < all; ++rank) {
          whole.emplace_back(52, all, rank, options);
          whole.back().divide(all, rank, taken);
        }
        for (size_t rank = 0; rank < ranks; ++rank) {
          few.emplace_back(52, all, rank, options);
          few.back().divide_shares(all, ranks, rank, batch, taken);
          EXPECT_EQ(few.back().shares(), ranks == 1 ? 5U : rank == 0 ? 3U : 2U);
        }
        size_t done = taken;
        while (true) {
          std::vector<std::optional<Indices>> shares(all);
          for (size_t rank = 0; rank < all; ++rank) shares[rank] = whole[rank].next(batch);
          for (size_t rank = 0; rank < ranks; ++rank) {
            const auto own = few[rank].next(batch * few[rank].shares());
            ASSERT_EQ(own.has_value(), shares[0].has_value());
            if (!own) continue;
            Indices expected;
            for (size_t share = rank; share < all; share += ranks) {
              expected.insert(expected.end(), shares[share]->begin(), shares[share]->end());
            }
            EXPECT_EQ(*own, expected);
          }
          if (!shares[0]) break;
          done += shares[0]->size() * all;
          EXPECT_EQ(few[0].taken(), done);
        }
      }
    }
  }
  DistributedSampler sampler(52, 5, 0);
  EXPECT_THROW(sampler.divide_shares(5, 6, 0, 3), UsageError);
  EXPECT_THROW(sampler.divide_shares(5, 2, 2, 3), UsageError);
  EXPECT_THROW(sampler.divide_shares(5, 2, 0, 0), UsageError);
}

}  // namespace
}  // namespace shoal
