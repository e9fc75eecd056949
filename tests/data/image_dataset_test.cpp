#include "data/image_dataset.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/data.h>
#include <torch/types.h>

#include "shoal/data.h"
#include "tests/data/data_folder.h"

namespace shoal::data {
namespace {

std::shared_ptr<ImageDataset> counting_images(at::ScalarType dtype = at::kFloat) {
  return std::make_shared<ImageDataset>(at::arange(40, at::kByte).view({10, 4}), at::arange(10, at::kLong),
                                        Normalisation{.mean = 0.5, .deviation = 0.25}, dtype);
}

TEST(ImageDataset, gathers_and_normalises_the_samples_asked_for) {
  const auto batch = counting_images()->get_batch(std::vector<size_t>{7, 0, 7});
  EXPECT_TRUE(batch.target.equal(at::tensor({7, 0, 7}, at::kLong)));
  EXPECT_THAT(batch.data.sizes(), testing::ElementsAre(3, 4));
  EXPECT_FLOAT_EQ(batch.data[0][1].item<float>(), (29.0f / 255 - 0.5f) / 0.25f);
  EXPECT_FLOAT_EQ(batch.data[1][0].item<float>(), -2.0f);
}

TEST(ImageDataset, gives_the_dtype_asked_for) {
  const auto batch = counting_images(at::kDouble)->get_batch(std::vector<size_t>{7});
  EXPECT_DOUBLE_EQ(batch.data[0][1].item<double>(), (29.0 / 255 - 0.5) / 0.25);
}

TEST(ImageDataset, refuses_an_index_beyond_the_end) {
  EXPECT_THAT(refusal([] {
                counting_images()->get_batch(std::vector<size_t>{0, 10});
              }),
              testing::HasSubstr("sample 10 does not exist: the data set has 10 samples"));
}

TEST(ImageDataset, refuses_unequal_counts) {
  const auto pixels = at::zeros({3, 4}, at::kByte);
  EXPECT_THROW(ImageDataset(pixels, at::zeros({2}, at::kLong), {.mean = 0, .deviation = 1}, at::kFloat), UsageError);
}

// Two ranks with a data loader each see every sample once per epoch.
TEST(ImageDataset, serves_the_data_loader_of_libtorch) {
  using torch::data::datasets::SharedBatchDataset;
  std::vector<int64_t> seen;
  for (size_t rank = 0; rank < 2; ++rank) {
    const auto loader =
        torch::data::make_data_loader(SharedBatchDataset<Dataset>(counting_images()), DistributedSampler(10, 2, rank),
                                      torch::data::DataLoaderOptions(3).workers(1));
    for (const Batch& batch : *loader) {
      for (int64_t i = 0; i < batch.target.numel(); ++i) seen.push_back(batch.target[i].item<int64_t>());
    }
  }
  EXPECT_THAT(seen, testing::UnorderedElementsAre(0, 1, 2, 3, 4, 5, 6, 7, 8, 9));
}

}  // namespace
}  // namespace shoal::data
