// Checkpoints of whole trainings: schedules.

#include <gmock/gmock.h>
#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>
#include <torch/optim/schedulers/step_lr.h>

#include <cmath>
#include <numbers>

#include "tests/strategy/checkpoint/param_groups_training.h"

namespace shoal::test::checkpoint_schedules_test {
namespace {

using namespace param_groups_training;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// A custom schedule, whose rate is a function of libtorch's step count.
class Cosine : public torch::optim::LRScheduler {
 public:
  explicit Cosine(torch::optim::Optimizer& optimizer) : LRScheduler(optimizer), base_(get_current_lrs()) {}

 private:
  std::vector<double> get_lrs() override {
    auto rates = base_;
    for (auto& rate : rates) rate *= 0.5 + 0.5 * std::cos(std::numbers::pi * (step_count_ + 1) / 10);
    return rates;
  }
  std::vector<double> base_;
};

std::vector<double> rates_of(torch::optim::Optimizer& optimizer) {
  std::vector<double> rates;
  for (const auto& group : optimizer.param_groups()) rates.push_back(group.options().get_lr());
  return rates;
}

// Schedules continue with the same rates in every later step, under every strategy.
template <class Step, class Make>
void expect_schedule_goes_on(const std::string& strategy, const Step& step, const Make& make) {
  const SharedFolder folder;
  const auto running = start<SGD>(strategy, fast, two_groups(of_biases));
  auto schedules = make(*running->whole);
  std::apply([&](auto&... each) { (running->state->with(*each), ...); }, schedules);
  std::vector<std::vector<double>> expected;
  for (int64_t number = 0; number < 12; ++number) {
    running->step(number);
    std::apply([&](auto&... each) { (step(*each, number), ...); }, schedules);
    if (number == 4) save(folder / "run", *running->state, {.step = 5});
    expected.push_back(rates_of(*running->whole));
  }
  for (const bool used : {false, true}) {
    const auto resumed = start<SGD>(strategy, fast, two_groups(of_biases));
    auto again = make(*resumed->whole);
    std::apply([&](auto&... each) { (resumed->state->with(*each), ...); }, again);
    if (used) {
      for (int64_t number = 0; number < 3; ++number)
        std::apply([&](auto&... each) { (step(*each, number), ...); }, again);
    }
    const auto loaded = load(folder / "run", *resumed->state);
    EXPECT_THAT(loaded.differences, IsEmpty());
    EXPECT_TRUE(loaded.exact);
    for (int64_t number = 5; number < 12; ++number) {
      resumed->step(number);
      std::apply([&](auto&... each) { (step(*each, number), ...); }, again);
      EXPECT_EQ(rates_of(*resumed->whole), expected[number]) << strategy << " step " << number;
    }
    EXPECT_EQ(difference(resumed->parameters(), running->parameters()), 0);
  }
}

class Schedules : public testing::TestWithParam<std::string> {};

TEST_P(Schedules, BEY05_libtorchs_go_on) {
  using torch::optim::Optimizer;
  using torch::optim::ReduceLROnPlateauScheduler;
  using torch::optim::StepLR;
  const auto step = [](torch::optim::LRScheduler& schedule, int64_t) { schedule.step(); };
  expect_schedule_goes_on(GetParam(), step,
                          [](Optimizer& optimizer) { return std::tuple(std::make_unique<StepLR>(optimizer, 3, 0.5)); });
  expect_schedule_goes_on(GetParam(), step,
                          [](Optimizer& optimizer) { return std::tuple(std::make_unique<Cosine>(optimizer)); });
  expect_schedule_goes_on(GetParam(), step, [](Optimizer& optimizer) {
    return std::tuple(std::make_unique<StepLR>(optimizer, 3, 0.5), std::make_unique<StepLR>(optimizer, 4, 0.9));
  });
  // The metric improves at first and then stops: rates fall, with a cooldown.
  const auto metric = [](ReduceLROnPlateauScheduler& schedule, int64_t number) {
    schedule.step(number < 3 ? 1.0F / static_cast<float>(number + 1) : 0.5F);
  };
  expect_schedule_goes_on(GetParam(), metric, [](Optimizer& optimizer) {
    return std::tuple(std::make_unique<ReduceLROnPlateauScheduler>(
        optimizer, ReduceLROnPlateauScheduler::min, 0.5F, 1, 1e-4, ReduceLROnPlateauScheduler::rel, 1,
        std::vector<float>(optimizer.param_groups().size(), 0)));
  });
}

INSTANTIATE_TEST_SUITE_P(All, Schedules, testing::Values("ddp", "zero1", "megatron", "fsdp", "local_updates"),
                         [](const auto& info) { return info.param; });

TEST(TrainingCheckpoint, BEY05_schedules_that_do_not_fit_are_named) {
  const SharedFolder folder;
  const auto running = start<SGD>("ddp", fast, two_groups(of_biases));
  torch::optim::StepLR schedule(*running->whole, 2);
  save(folder / "without", *running->state);
  running->state->with(schedule);
  save(folder / "with", *running->state);
  const auto resumed = start<SGD>("ddp", fast, two_groups(of_biases));
  auto loaded = load(folder / "with", *resumed->state);
  EXPECT_FALSE(loaded.exact);
  EXPECT_THAT(loaded.differences, ElementsAre(HasSubstr("the state of 1 schedules")));
  torch::optim::ReduceLROnPlateauScheduler other(*resumed->whole);
  resumed->state->with(other);
  loaded = load(folder / "with", *resumed->state);
  EXPECT_THAT(loaded.differences,
              ElementsAre(HasSubstr("a ReduceLROnPlateauScheduler, which keeps its initial state")));
  loaded = load(folder / "without", *resumed->state);
  EXPECT_THAT(loaded.differences,
              ElementsAre(HasSubstr("a ReduceLROnPlateauScheduler, which keeps its initial state")));
}

}  // namespace
}  // namespace shoal::test::checkpoint_schedules_test
