// A DistributedSampler whose ranks change within an epoch (ELA01, ELA05).

#include <gtest/gtest.h>
#include <torch/serialize.h>
#include <torch/types.h>

#include <sstream>

#include "shoal/error.h"
#include "tests/loop/sampler_epochs.h"

namespace shoal::sampler_division_test {
namespace {

using namespace sampler_epochs;

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
        sampler.redistribute(ranks, rank, taken);
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
      taken = copies[0].consumed();
    }
    EXPECT_EQ(distinct(seen).size(), size);
    EXPECT_LT(seen.size(), size + 4) << "only the last division is padded";
  }
}

TEST(DistributedSampler, ELA01_a_division_concerns_its_epoch_alone) {
  DistributedSampler sampler(10, 2, 0, {.seed = 5});
  sampler.redistribute(1, 0, 6);
  sampler.reset();
  EXPECT_EQ(sampler.num_samples(), 4U);
  EXPECT_EQ(sampler.consumed(), 6U);
  sampler.set_epoch(1);
  EXPECT_EQ(sampler.consumed(), 0U);
  sampler.reset();
  EXPECT_EQ(sampler.num_samples(), 10U);
  EXPECT_THROW(sampler.redistribute(2, 2), UsageError);
}

TEST(DistributedSampler, ELA01_seeks_within_a_division_that_has_begun) {
  DistributedSampler sampler(12, 2, 0, {.shuffle = false});
  sampler.redistribute(2, 0, 6);
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
        stands_in ? sampler.redistribute_slices(3, 2, rank, 2, 6) : sampler.redistribute(3, rank, 6);
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

TEST(DistributedSampler, ELA01_a_division_is_saved_and_loaded) {
  DistributedSampler sampler(20, 2, 1, {.seed = 5});
  sampler.set_epoch(3);
  sampler.redistribute(2, 1, 6);
  sampler.seek(2);
  std::stringstream stream;
  torch::serialize::OutputArchive out;
  sampler.save(out);
  out.save_to(stream);
  torch::serialize::InputArchive in;
  in.load_from(stream);
  DistributedSampler other(20, 2, 1, {.seed = 5});
  other.load(in);
  EXPECT_EQ(other.consumed(), sampler.consumed());
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
          whole.back().redistribute(all, rank, taken);
        }
        for (size_t rank = 0; rank < ranks; ++rank) {
          few.emplace_back(52, all, rank, options);
          few.back().redistribute_slices(all, ranks, rank, batch, taken);
          EXPECT_EQ(few.back().slices(), ranks == 1 ? 5U : rank == 0 ? 3U : 2U);
        }
        size_t done = taken;
        while (true) {
          std::vector<std::optional<Indices>> shares(all);
          for (size_t rank = 0; rank < all; ++rank) shares[rank] = whole[rank].next(batch);
          for (size_t rank = 0; rank < ranks; ++rank) {
            const auto own = few[rank].next(batch * few[rank].slices());
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
          EXPECT_EQ(few[0].consumed(), done);
        }
      }
    }
  }
  DistributedSampler sampler(52, 5, 0);
  EXPECT_THROW(sampler.redistribute_slices(5, 6, 0, 3), UsageError);
  EXPECT_THROW(sampler.redistribute_slices(5, 2, 2, 3), UsageError);
  EXPECT_THROW(sampler.redistribute_slices(5, 2, 0, 0), UsageError);
}

}  // namespace
}  // namespace shoal::sampler_division_test
