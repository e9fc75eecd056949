#include "shoal/precision.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <limits>

#include "shoal/error.h"

namespace shoal::grad_scaler_test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr auto infinity = std::numeric_limits<float>::infinity();
constexpr auto nan = std::numeric_limits<float>::quiet_NaN();

GradScalerOptions small() {
  return {.initial_scale = 16, .growth_interval = 3, .hysteresis = 2, .min_scale = 2};
}

std::vector<double> scales_after(GradScaler& scaler, const std::vector<bool>& found) {
  std::vector<double> scales;
  for (const bool inf : found) {
    scaler.update(inf);
    scales.push_back(scaler.value());
  }
  return scales;
}

TEST(GradScaler, MEG10_defaults_are_megatrons) {
  const GradScalerOptions options;
  EXPECT_EQ(GradScaler().value(), 4294967296.0);
  EXPECT_EQ(options.growth_factor, 2);
  EXPECT_EQ(options.backoff_factor, 0.5);
  EXPECT_EQ(options.growth_interval, 1000);
  EXPECT_EQ(options.hysteresis, 2);
  EXPECT_EQ(options.min_scale, 1);
}

TEST(GradScaler, MEG10_grows_after_an_interval_without_inf) {
  GradScaler scaler(small());
  EXPECT_EQ(scales_after(scaler, {false, false, false, false, false, true, false, false, false}),
            (std::vector<double>{16, 16, 32, 32, 32, 32, 32, 32, 64}));
}

// The first inf is tolerated; later ones are not, until the scale has grown again.
TEST(GradScaler, MEG10_backs_off_after_hysteresis_down_to_the_minimum) {
  GradScaler scaler(small());
  EXPECT_EQ(scales_after(scaler, {true, true, true, false, true, true}), (std::vector<double>{16, 8, 4, 4, 2, 2}));
  EXPECT_EQ(scales_after(scaler, {false, false, false, true, true}), (std::vector<double>{2, 2, 4, 4, 2}));
}

// Numbers of torch.amp.GradScaler(init_scale=16, growth_interval=3), which has no hysteresis.
TEST(GradScaler, without_hysteresis_it_is_torch_amps) {
  auto options = small();
  options.hysteresis = 1;
  GradScaler scaler(options);
  EXPECT_EQ(scales_after(scaler, {false, true, false, false, false, true, true}),
            (std::vector<double>{16, 8, 8, 8, 16, 8, 4}));
}

TEST(GradScaler, MEG10_constant_scale_stays) {
  GradScaler scaler({.initial_scale = 8, .dynamic = false});
  EXPECT_EQ(scales_after(scaler, {true, true, true, false}), (std::vector<double>{8, 8, 8, 8}));
}

TEST(GradScaler, stays_within_float) {
  GradScaler scaler({.initial_scale = std::ldexp(1.0, 127), .growth_interval = 1});
  scaler.update(false);
  EXPECT_EQ(scaler.value(), std::ldexp(1.0, 127));
}

TEST(GradScaler, scaled_loss_gives_scaled_gradients_that_unscale_takes_back) {
  const GradScaler scaler({.initial_scale = 1024});
  for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    auto weight = at::full({3}, 2.0, dtype).requires_grad_(true);
    scaler.scale(weight.sum() * 0.5).backward();
    EXPECT_TRUE(weight.grad().equal(at::full({3}, 512.0, dtype)));
    EXPECT_FALSE(scaler.unscale({weight.grad(), at::Tensor()}));
    EXPECT_TRUE(weight.grad().equal(at::full({3}, 0.5, dtype)));
  }
}

TEST(GradScaler, MEG10_finds_inf_and_nan_in_any_of_mixed_gradients) {
  const GradScaler scaler({.initial_scale = 4});
  for (const auto bad : {infinity, -infinity, nan}) {
    for (size_t at = 0; at < 4; ++at) {
      std::vector<at::Tensor> gradients{at::ones({70}), at::ones({2, 5}, at::kHalf), at::ones({}, at::kDouble),
                                        at::ones({4, 2}).to_sparse(1)};
      EXPECT_FALSE(scaler.unscale(gradients));
      (gradients[at].is_sparse() ? gradients[at]._values() : gradients[at]).view(-1)[-1].fill_(bad);
      EXPECT_TRUE(scaler.unscale(gradients)) << bad << " in " << at;
    }
  }
}

TEST(GradScaler, knows_what_it_has_unscaled_until_the_update) {
  GradScaler scaler({.initial_scale = 4});
  const auto one = at::ones({4}), sparse = at::ones({4, 2}).to_sparse(1), other = at::ones({4});
  scaler.unscale({one, sparse, at::ones({3})});
  EXPECT_TRUE(scaler.unscaled({other, one}));
  EXPECT_TRUE(scaler.unscaled({sparse}));
  EXPECT_FALSE(scaler.unscaled({other, at::Tensor(), at::ones({3}), at::ones({0})}));
  scaler.update(false);
  EXPECT_FALSE(scaler.unscaled({one, sparse}));
}

TEST(GradScaler, unscales_sparse_gradients_and_what_is_not_contiguous) {
  const GradScaler scaler({.initial_scale = 4});
  const auto sparse = at::full({3, 2}, 8.0).to_sparse(1);
  const auto whole = at::full({4, 6}, 8.0);
  EXPECT_FALSE(scaler.unscale({sparse, whole.slice(1, 0, 2), whole.slice(1, 2, 4).t()}));
  EXPECT_TRUE(sparse.to_dense().equal(at::full({3, 2}, 2.0)));
  EXPECT_TRUE(whole.slice(1, 0, 4).equal(at::full({4, 4}, 2.0)));
  EXPECT_TRUE(whole.slice(1, 4, 6).equal(at::full({4, 2}, 8.0)));
}

TEST(GradScaler, state_goes_on_in_another_scaler) {
  const std::vector<bool> first{false, true, false, false}, then{false, true, true, false, false, false};
  GradScaler one(small()), other(small());
  scales_after(one, first);
  other.load(one.state());
  EXPECT_EQ(scales_after(other, then), scales_after(one, then));
  EXPECT_EQ(other.state().good_steps, one.state().good_steps);
}

TEST(GradScaler, wrong_options_are_all_named) {
  const GradScalerOptions wrong{.initial_scale = -1,
                                .growth_factor = 1,
                                .backoff_factor = 1,
                                .growth_interval = 0,
                                .hysteresis = 0,
                                .min_scale = 0};
  try {
    wrong.validate();
    FAIL() << "not refused";
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("initial_scale"), HasSubstr("growth_factor"), HasSubstr("backoff_factor"),
                                    HasSubstr("growth_interval"), HasSubstr("hysteresis"), HasSubstr("min_scale")));
  }
  EXPECT_THROW(GradScaler({.initial_scale = nan}), UsageError);
  EXPECT_THROW(GradScaler({.initial_scale = 1e39}), UsageError);
  EXPECT_THROW(GradScaler({.initial_scale = 2, .min_scale = 4}), UsageError);
  EXPECT_THROW(GradScaler().load({0, 0, 0}), UsageError);
  EXPECT_THROW(GradScaler().load({1, -1, 0}), UsageError);
  EXPECT_THROW(GradScaler().unscale({at::ones({2}, at::kInt)}), UsageError);
}

}  // namespace
}  // namespace shoal::grad_scaler_test
