// Schedules compared with Python's numbers (vectors.h) and decent-dp's (decent_vectors.h); the optimizer's rate is 0.5.

#include "shoal/schedules.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include "shoal/error.h"
#include "shoal/optim.h"
#include "tests/optim/decent_vectors.h"
#include "tests/optim/vectors.h"

namespace shoal::schedules_test {
namespace {

using testing::DoubleNear;
using testing::Pointwise;

double rate_of(const torch::optim::Optimizer& optimizer, size_t group = 0) {
  return optimizer.param_groups()[group].options().get_lr();
}

std::vector<double> rates(torch::optim::Optimizer& optimizer, LambdaLR& schedule, int steps = 14) {
  std::vector<double> all;
  for (int i = 0; i < steps; ++i) {
    EXPECT_EQ(schedule.position(), i);
    all.push_back(rate_of(optimizer));
    schedule.step();
  }
  return all;
}

template <class Schedule, class... Arguments>
void compare(const std::vector<double>& expected, const Arguments&... arguments) {
  torch::optim::SGD optimizer({at::ones(1)}, torch::optim::SGDOptions(0.5));
  Schedule schedule(optimizer, arguments...);
  EXPECT_THAT(rates(optimizer, schedule), Pointwise(DoubleNear(1e-12), expected));
}

TEST(Schedules, equal_pythons) {
  compare<LinearWarmup>(vectors::linear_warmup, 6, 0.25);
  compare<CosineWithWarmup>(
      vectors::cosine_with_warmup,
      CosineWithWarmupOptions{.total_steps = 13, .warmup_steps = 4, .start_factor = 0.1, .final_factor = 0.1});
  compare<OneCycle>(vectors::one_cycle, OneCycleOptions{.total_steps = 14});
  compare<OneCycle>(vectors::one_cycle_linear,
                    OneCycleOptions{.total_steps = 14, .rising = 0.4, .initial_divisor = 5, .anneal = Anneal::linear});
  compare<OneCycle>(vectors::one_cycle_three_phases,
                    OneCycleOptions{.total_steps = 14, .final_divisor = 100, .three_phase = true});
}

// decent-dp's cosine takes t_max = 9 steps after a warm-up of 4, down to an eta_min of 0.05.
TEST(Schedules, DEC15_cosine_with_warmup_equals_decent_dps) {
  compare<CosineWithWarmup>(
      vectors::decent_cosine_with_warmup,
      CosineWithWarmupOptions{.total_steps = 13, .warmup_steps = 4, .start_factor = 0.01, .final_factor = 0.1});
}

TEST(Schedules, stay_at_their_last_rate) {
  torch::optim::SGD optimizer({at::ones(1)}, torch::optim::SGDOptions(0.5));
  CosineWithWarmup cosine(optimizer, {.total_steps = 5, .final_factor = 0.2});
  for (int i = 0; i < 20; ++i) cosine.step();
  EXPECT_DOUBLE_EQ(rate_of(optimizer), 0.1);
  optimizer.param_groups()[0].options().set_lr(0.5);
  OneCycle cycle(optimizer, {.total_steps = 10, .final_divisor = 2});
  for (int i = 0; i < 20; ++i) cycle.step();
  EXPECT_DOUBLE_EQ(rate_of(optimizer), 0.01);
}

// Every group scales its own rate, also with shoal's own optimizers.
TEST(Schedules, OSS10_lambda_scales_each_groups_rate) {
  Lamb optimizer({at::ones(1)}, LambOptions(0.5));
  optimizer.add_param_group(
      torch::optim::OptimizerParamGroup({at::ones(2)}, std::make_unique<LambOptions>(LambOptions(8))));
  LambdaLR schedule(optimizer, [](int64_t step) { return 1.0 / static_cast<double>(1 + step); });
  EXPECT_EQ(rate_of(optimizer, 1), 8);
  schedule.step();
  EXPECT_EQ(rate_of(optimizer, 0), 0.25);
  EXPECT_EQ(rate_of(optimizer, 1), 4);
}

TEST(Schedules, go_on_from_a_position) {
  torch::optim::SGD optimizer({at::ones(1)}, torch::optim::SGDOptions(0.5));
  LinearWarmup schedule(optimizer, 6, 0.25);
  schedule.set_position(4);
  EXPECT_EQ(schedule.position(), 4);
  EXPECT_DOUBLE_EQ(rate_of(optimizer), vectors::linear_warmup[4]);
  schedule.step();
  EXPECT_DOUBLE_EQ(rate_of(optimizer), vectors::linear_warmup[5]);
  EXPECT_THROW(schedule.set_position(-1), UsageError);
}

TEST(Schedules, wrong_options_are_refused_and_leave_the_rate) {
  torch::optim::SGD optimizer({at::ones(1)}, torch::optim::SGDOptions(0.5));
  EXPECT_THROW(LinearWarmup(optimizer, -1), UsageError);
  EXPECT_THROW(LinearWarmup(optimizer, 5, 0), UsageError);
  EXPECT_THROW(LinearWarmup(optimizer, 5, 1.5), UsageError);
  for (const CosineWithWarmupOptions& wrong :
       {CosineWithWarmupOptions{}, CosineWithWarmupOptions{.total_steps = 5, .warmup_steps = 5},
        CosineWithWarmupOptions{.total_steps = 5, .warmup_steps = -1},
        CosineWithWarmupOptions{.total_steps = 5, .start_factor = 0},
        CosineWithWarmupOptions{.total_steps = 5, .final_factor = 2}}) {
    EXPECT_THROW(CosineWithWarmup(optimizer, wrong), UsageError);
  }
  for (const OneCycleOptions& wrong :
       {OneCycleOptions{}, OneCycleOptions{.total_steps = 3}, OneCycleOptions{.total_steps = 10, .rising = 1},
        OneCycleOptions{.total_steps = 10, .rising = 0.6, .three_phase = true},
        OneCycleOptions{.total_steps = 10, .initial_divisor = 0},
        OneCycleOptions{.total_steps = 10, .final_divisor = -1}}) {
    EXPECT_THROW(OneCycle(optimizer, wrong), UsageError);
  }
  EXPECT_EQ(rate_of(optimizer), 0.5);
}

}  // namespace
}  // namespace shoal::schedules_test
