// Data loaders over a DistributedSampler.

#include <gtest/gtest.h>
#include <torch/data.h>

#include <utility>

#include "shoal/error.h"
#include "tests/loop/sampler_epochs.h"

namespace shoal::sampler_loader_test {
namespace {

using namespace sampler_epochs;

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
    EXPECT_EQ(sampler.remaining(), 10U);
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

TEST(DistributedSampler, counts_what_a_data_loader_takes) {
  for (const auto& options : {Options{}, keep, drop}) {
    DistributedSampler sampler(21, 2, 1, options);
    const auto expect_left = [&] {
      const auto left = sampler.remaining();
      EXPECT_EQ(left, served(sampler, 0).size());
    };
    expect_left();
    sampler.seek(6);
    expect_left();
    sampler.redistribute(3, 1, 7);
    expect_left();
    sampler.redistribute_slices(4, 2, 1, 2, 5);
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
  EXPECT_EQ(sampler.consumed(), other.consumed());
  EXPECT_EQ(drain(sampler), drain(other));
  sampler.set_epoch(3);
  other.set_epoch(3);
  EXPECT_EQ(served(sampler, 0), served(other, 0));
  EXPECT_THROW(sampler.set_options({.drop_last = true, .pad = false}), UsageError);
}

}  // namespace
}  // namespace shoal::sampler_loader_test
