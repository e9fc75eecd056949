#include "models/loss.h"

#include <gtest/gtest.h>
#include <torch/types.h>

namespace shoal::models {
namespace {

TEST(Loss, is_the_mean_over_samples_and_positions) {
  const auto logits = at::zeros({2, 3, 4});
  const auto targets = at::zeros({2, 3}, at::kLong);
  EXPECT_FLOAT_EQ(loss_of(logits, targets).item<float>(), std::log(4.0f));
}

TEST(Loss, widens_low_precision_and_keeps_double) {
  const auto targets = at::zeros({2}, at::kLong);
  EXPECT_EQ(loss_of(at::zeros({2, 4}, at::kBFloat16), targets).scalar_type(), at::kFloat);
  EXPECT_EQ(loss_of(at::zeros({2, 4}, at::kHalf), targets).scalar_type(), at::kFloat);
  EXPECT_EQ(loss_of(at::zeros({2, 4}, at::kFloat), targets).scalar_type(), at::kFloat);
  EXPECT_EQ(loss_of(at::zeros({2, 4}, at::kDouble), targets).scalar_type(), at::kDouble);
}

}  // namespace
}  // namespace shoal::models
