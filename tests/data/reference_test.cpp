// Reference data compared with numbers of the Python definition.

#include "data/reference.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include "shoal/error.h"

namespace shoal::data {
namespace {

using testing::ElementsAre;

TEST(ReferenceImage, matches_the_definition) {
  const auto image = reference_image({});
  EXPECT_EQ(image.label, 6);
  ASSERT_EQ(image.pixels.size(), 784u);
  EXPECT_EQ(image.pixels[0], 0.397225857f);
  EXPECT_EQ(image.pixels[1], -0.0281520486f);
  EXPECT_EQ(image.pixels[2], -0.205376267f);
}

TEST(ReferenceText, matches_the_definition) {
  EXPECT_THAT(reference_text({}, 7), ElementsAre(16, 98, 253, 2, 28, 159, 47, 254));
}

TEST(ReferenceBatch, matches_the_definition_of_images) {
  const auto batch = reference_batch("mlp", "tiny", {.seed = 3, .step = 2, .rank = 1, .micro = 1}, 2);
  EXPECT_TRUE(batch.target.equal(at::tensor({5, 2}, at::kLong)));
  EXPECT_THAT(batch.data.sizes(), ElementsAre(2, 784));
  EXPECT_EQ(batch.data[1][0].item<float>(), 0.07411754131317139f);
  EXPECT_EQ(batch.data[1][2].item<float>(), -0.28051769733428955f);
  EXPECT_EQ(batch.data[1][783].item<float>(), 0.1362883448600769f);
}

TEST(ReferenceBatch, matches_the_definition_of_text) {
  const auto batch = reference_batch("gpt", "tiny", {.seed = 3, .step = 2, .rank = 1, .micro = 1}, 2);
  EXPECT_THAT(batch.data.sizes(), ElementsAre(2, 32));
  EXPECT_TRUE(batch.data[1].narrow(0, 0, 5).equal(at::tensor({166, 82, 173, 116, 85}, at::kLong)));
  EXPECT_TRUE(batch.target[1].narrow(0, 27, 5).equal(at::tensor({73, 129, 151, 6, 49}, at::kLong)));
  EXPECT_TRUE(batch.data.narrow(1, 1, 31).equal(batch.target.narrow(1, 0, 31)));
}

TEST(ReferenceBatch, micro_batches_are_stretches_of_one_batch) {
  const auto whole = reference_batch("cnn", "tiny", {}, 4);
  const auto second = reference_batch("cnn", "tiny", {.micro = 1}, 2);
  EXPECT_TRUE(second.data.equal(whole.data.narrow(0, 2, 2)));
  EXPECT_TRUE(second.target.equal(whole.target.narrow(0, 2, 2)));
}

TEST(ReferenceBatch, casts_inputs_only) {
  const auto single = reference_batch("mlp", "tiny", {}, 2);
  const auto batch = reference_batch("mlp", "tiny", {}, 2, at::kDouble);
  EXPECT_TRUE(batch.data.equal(single.data.to(at::kDouble)));
  EXPECT_EQ(batch.target.scalar_type(), at::kLong);
  EXPECT_EQ(reference_batch("gpt", "tiny", {}, 2, at::kDouble).data.scalar_type(), at::kLong);
}

TEST(ReferenceBatch, refuses_unknown_models) {
  EXPECT_THROW(reference_batch("vgg", "tiny", {}, 2), UsageError);
  EXPECT_THROW(reference_batch("mlp", "huge", {}, 2), UsageError);
}

}  // namespace
}  // namespace shoal::data
