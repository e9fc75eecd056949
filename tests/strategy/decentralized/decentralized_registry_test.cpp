// The optimizer that a decentralised training of the registry shows: its options are those of the steps.

#include <gmock/gmock.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>

#include "shoal/training.h"
#include "tests/strategy/decentralized/decentralized_ring.h"
#include "tests/support/shared_folder.h"

namespace shoal::decentralized_registry_test {
namespace {

using namespace test;  // NOLINT(google-build-using-namespace): helpers of this folder's tests
using torch::optim::Optimizer;
using torch::optim::SGD;
using torch::optim::SGDOptions;

// Weights and biases have different rates.
OptimizerRecipe::ParamGroups groups_of(const torch::nn::Module& module) {
  std::vector<at::Tensor> weights;
  std::vector<at::Tensor> biases;
  for (const auto& parameter : module.parameters()) (parameter.dim() > 1 ? weights : biases).push_back(parameter);
  OptimizerRecipe::ParamGroups groups;
  groups.emplace_back(weights, std::make_unique<SGDOptions>(SGDOptions(0.1).momentum(0.9)));
  groups.emplace_back(biases, std::make_unique<SGDOptions>(0.02));
  return groups;
}

Training<MlpImpl> make(const Mlp& model, const ScheduleFactory& schedule = {}) {
  TrainingOptions options{.options = {{"bucket_cap_mb", "0.001"}, {"neighbour_timeout", "60"}}, .schedule = schedule};
  return make_training("decentralized", model, optimizer_recipe<SGD>(SGDOptions(7), groups_of), group(), options);
}

// All ranks have the same data: mixing changes nothing.
at::Tensor data(int64_t step) {
  return batch(0, step);
}

double rate(const Optimizer& optimizer, size_t number) {
  return optimizer.param_groups()[number].options().get_lr();
}

// One process.
struct Reference {
  void step(int64_t step) {
    mean_loss(model->forward(data(step))).backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  Mlp model = seeded(1);
  SGD optimizer{groups_of(*model), SGDOptions(7)};
};

TEST(DecentralizedTraining, steps_use_the_options_that_its_optimizer_has) {
  Reference reference;
  torch::optim::StepLR expected(reference.optimizer, 2, 0.5);
  const auto model = seeded(1);
  auto training = make(model);
  torch::optim::StepLR schedule(training->optimizer(), 2, 0.5);
  for (int64_t step = 0; step < 8; ++step) {
    const auto change = [&](Optimizer& optimizer) {
      auto& groups = optimizer.param_groups();
      if (step == 3) static_cast<SGDOptions&>(groups[1].options()).momentum(0.5).weight_decay(0.1);
      if (step == 5) groups[0].options().set_lr(0.3);
    };
    change(reference.optimizer);
    reference.step(step);
    expected.step();
    const auto loss = mean_loss(training.forward(data(step)));
    change(training->optimizer());
    if (step % 2 == 0) {
      training->backward(loss);
    } else {
      loss.backward();
    }
    training->step();
    training->zero_grad();
    schedule.step();
    EXPECT_LT(difference(model->parameters(), reference.model->parameters()), 1e-11) << step;
  }
}

// A program that has one schedule for all strategies may make it for the optimizer as well.
TEST(DecentralizedTraining, its_optimizer_shows_the_rates_of_the_strategys_schedule) {
  const auto warmup = [](Optimizer& optimizer) { return std::make_unique<LinearWarmup>(optimizer, 6); };
  for (const bool twice : {false, true}) {
    Reference reference;
    const auto expected = warmup(reference.optimizer);
    const auto model = seeded(1);
    auto training = make(model, warmup);
    auto& optimizer = training->optimizer();
    const auto again = twice ? warmup(optimizer) : nullptr;
    for (int64_t step = 0; step < 8; ++step) {
      for (auto* one : {&optimizer, static_cast<Optimizer*>(&reference.optimizer)}) {
        if (step == 4) static_cast<SGDOptions&>(one->param_groups()[1].options()).momentum(0.5);
      }
      reference.step(step);
      expected->step();
      training->backward(mean_loss(training.forward(data(step))));
      training->step();
      training->zero_grad();
      if (again) again->step();
      EXPECT_LT(difference(model->parameters(), reference.model->parameters()), 1e-11) << step;
      for (size_t number = 0; number < 2; ++number) {
        EXPECT_DOUBLE_EQ(rate(optimizer, number), rate(reference.optimizer, number)) << step;
      }
    }
  }
}

TEST(DecentralizedTraining, BEY05_a_checkpoint_has_the_options_that_its_optimizer_has) {
  const SharedFolder folder;
  const auto train = [](Training<MlpImpl>& training, torch::optim::StepLR& schedule, int64_t from, int64_t to) {
    for (int64_t step = from; step < to; ++step) {
      training->backward(mean_loss(training.forward(batch(me(), step))));
      training->step();
      training->zero_grad();
      schedule.step();
    }
  };
  const auto model = seeded(1);
  auto training = make(model);
  torch::optim::StepLR schedule(training->optimizer(), 2, 0.5);
  train(training, schedule, 0, 3);
  schedule.step();  // the rates of the next step
  static_cast<SGDOptions&>(training->optimizer().param_groups()[1].options()).momentum(0.7);
  {
    auto state = training->state();
    state->with(schedule);
    save(folder / "run", *state, {.step = 3});
  }
  const auto rates = std::vector{rate(training->optimizer(), 0), rate(training->optimizer(), 1)};
  train(training, schedule, 3, 7);

  const auto other = seeded(2);
  auto resumed = make(other);
  torch::optim::StepLR again(resumed->optimizer(), 2, 0.5);
  auto state = resumed->state();
  state->with(again);
  const auto loaded = load(folder / "run", *state);
  EXPECT_TRUE(loaded.exact);
  EXPECT_THAT(loaded.differences, testing::IsEmpty());
  EXPECT_EQ(rate(resumed->optimizer(), 0), rates[0]);
  EXPECT_EQ(rate(resumed->optimizer(), 1), rates[1]);
  EXPECT_EQ(static_cast<const SGDOptions&>(resumed->optimizer().param_groups()[1].options()).momentum(), 0.7);
  train(resumed, again, 3, 7);
  EXPECT_EQ(difference(other->parameters(), model->parameters()), 0);
  group().barrier().wait();
}

}  // namespace
}  // namespace shoal::decentralized_registry_test
