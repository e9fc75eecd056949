#include "data/fashion_mnist.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <numeric>

#include "tests/data/data_folder.h"

namespace shoal::data {
namespace {

using testing::AllOf;
using testing::HasSubstr;

class FashionMnist : public testing::Test {
 protected:
  void write_images(const Bytes& bytes) { folder_.write_gzip("train-images-idx3-ubyte.gz", bytes); }
  void write_labels(const Bytes& bytes) { folder_.write_gzip("train-labels-idx1-ubyte.gz", bytes); }
  std::string error() {
    return refusal([&] { fashion_mnist(Split::train, folder_.path()); });
  }

  DataFolder folder_;
};

TEST_F(FashionMnist, reads_a_folder_of_plain_or_packed_files) {
  write_images(idx({20, 28, 28}));
  folder_.write("train-labels-idx1-ubyte", idx({20}, 10));
  const auto data = fashion_mnist(Split::train, folder_.path());
  EXPECT_EQ(data->size(), 20u);
  const auto batch = data->get_batch(std::vector<size_t>{0, 19});
  EXPECT_THAT(batch.data.sizes(), testing::ElementsAre(2, 784));
  EXPECT_EQ(batch.target[1].item<int64_t>(), 9);
}

TEST_F(FashionMnist, says_how_to_get_a_missing_folder) {
  const auto message = refusal([&] { fashion_mnist(Split::train, folder_.path() / "absent"); });
  EXPECT_THAT(message, AllOf(HasSubstr("absent"), HasSubstr("apt-get install dataset-fashion-mnist")));
}

TEST_F(FashionMnist, names_a_missing_file) {
  write_images(idx({20, 28, 28}));
  EXPECT_THAT(error(), AllOf(HasSubstr(folder_.path().string()), HasSubstr("train-labels-idx1-ubyte.gz")));
  EXPECT_THAT(refusal([&] { fashion_mnist(Split::test, folder_.path()); }), HasSubstr("t10k-images-idx3-ubyte"));
}

TEST_F(FashionMnist, names_unequal_counts) {
  write_images(idx({20, 28, 28}));
  write_labels(idx({19}, 10));
  EXPECT_THAT(error(), AllOf(HasSubstr("train-images-idx3-ubyte.gz has 20 images"),
                             HasSubstr("train-labels-idx1-ubyte.gz has 19 labels")));
}

TEST_F(FashionMnist, names_images_of_another_size) {
  write_images(idx({20, 32, 32}));
  write_labels(idx({20}, 10));
  EXPECT_THAT(error(), AllOf(HasSubstr("train-images"), HasSubstr("32 x 32 pixels")));
}

TEST_F(FashionMnist, names_a_label_beyond_the_classes) {
  write_images(idx({20, 28, 28}));
  write_labels(idx({20}));
  EXPECT_THAT(error(), AllOf(HasSubstr("train-labels"), HasSubstr("label 19")));
}

TEST_F(FashionMnist, names_an_empty_file) {
  write_images(idx({0, 28, 28}));
  write_labels(idx({0}));
  EXPECT_THAT(error(), AllOf(HasSubstr("train-labels"), HasSubstr("no samples")));
}

TEST(InstalledFashionMnist, is_normalised) {
  std::shared_ptr<ImageDataset> train, test;
  try {
    train = fashion_mnist(Split::train);
    test = fashion_mnist(Split::test);
  } catch (const UsageError& error) {
    GTEST_SKIP() << error.what();
  }
  EXPECT_EQ(train->size(), 60000u);
  EXPECT_EQ(test->size(), 10000u);
  std::vector<size_t> all(60000);
  std::iota(all.begin(), all.end(), 0);
  const auto batch = train->get_batch(all);
  EXPECT_NEAR(batch.data.mean().item<double>(), 0, 1e-3);
  EXPECT_NEAR(batch.data.std().item<double>(), 1, 1e-3);
  EXPECT_TRUE(batch.target.bincount().equal(at::full({10}, 6000, at::kLong)));
}

}  // namespace
}  // namespace shoal::data
