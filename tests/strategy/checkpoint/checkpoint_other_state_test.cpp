// Loads of the state of another optimizer, or of one with other options.

#include <gmock/gmock.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <filesystem>
#include <string>

#include "engine/checkpoint/contents.h"
#include "engine/checkpoint/training_state.h"
#include "shoal/checkpoint.h"
#include "shoal/ddp.h"
#include "shoal/local_updates.h"
#include "shoal/optim.h"
#include "shoal/training.h"
#include "tests/support/models.h"
#include "tests/support/refusal.h"
#include "tests/support/shared_folder.h"
#include "tests/support/world.h"

namespace shoal::test::checkpoint_other_state_test {
namespace {

using testing::HasSubstr;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using Groups = OptimizerRecipe::ParamGroups;

// theta and its momentum stay those of the training.
TEST(LoadLocalUpdates, BEY05_a_load_that_is_refused_for_another_optimizer_changes_nothing) {
  const SharedFolder folder;
  const LocalUpdatesOptions options{.every = 3, .outer = OuterNesterov{}};
  const auto train = [](Mlp& model, LocalUpdates& updates, int64_t from, int64_t to) {
    for (int64_t step = from; step < to; ++step) {
      mean_loss(model->forward(batch(group().rank(), step))).backward();
      updates.step();
      updates.zero_grad();
    }
  };
  {
    auto model = seeded(1);
    torch::optim::SGD inner(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    LocalUpdates updates(model, inner, group(), options);
    TrainingState state(updates);
    train(model, updates, 0, 7);
    save(folder / "run", state, {.step = 7});
  }
  std::vector<std::vector<at::Tensor>> ends;
  for (const bool fails : {false, true}) {
    auto model = seeded(2);
    AdamW inner(model->parameters(), AdamWOptions(0.01));
    LocalUpdates updates(model, inner, group(), options);
    TrainingState state(updates);
    train(model, updates, 0, 4);
    if (fails) {
      EXPECT_THAT(refusal([&] { load(folder / "run", state); }),
                  testing::AllOf(HasSubstr("step-7"), HasSubstr("first."), HasSubstr("model_only")));
      EXPECT_EQ(updates.steps(), 4);
    }
    train(model, updates, 4, 10);
    ends.push_back(copies(*model));
  }
  EXPECT_EQ(difference(ends[0], ends[1]), 0);
}

// Between optimizers, or options, whose states differ in a field.
template <class From, class To>
void expect_taken_over(const SharedFolder& folder, const auto& from, const auto& to) {
  const auto run = [&]<class Optimizer>(Optimizer& optimizer, const Mlp& model, const auto& load_state) {
    DistributedDataParallel parallel(model, group());
    TrainingState state(parallel, optimizer);
    load_state(state);
    mean_loss(parallel.forward(batch(group().rank(), 0))).backward();
    optimizer.step();
    save(folder / typeid(Optimizer).name(), state, {.step = 1});
  };
  const auto model = seeded(1);
  From first(model->parameters(), from);
  run(first, model, [](TrainingState&) {});
  const auto other = seeded(2);
  To second(other->parameters(), to);
  run(second, other, [&](TrainingState& state) {
    EXPECT_FALSE(load(folder / typeid(From).name(), state, {.options = false}).exact);
    EXPECT_EQ(difference(copies(*other), copies(*model)), 0);
  });
  EXPECT_EQ(second.state().size(), 6U);
}

TEST(LoadOtherState, BEY05_fields_that_the_options_here_need_begin_with_zero) {
  const SharedFolder folder;
  using torch::optim::Adam;
  using torch::optim::AdamOptions;
  using torch::optim::RMSprop;
  using torch::optim::RMSpropOptions;
  expect_taken_over<Adam, AccumAdam>(folder, AdamOptions(0.01), AccumAdamOptions(0.01));
  expect_taken_over<RMSprop, RMSprop>(folder, RMSpropOptions(0.01), RMSpropOptions(0.01).momentum(0.9).centered(true));
}

// Both have a momentum_buffer.
TEST(LoadOtherState, BEY05_muon_with_adamw_refuses_the_momentum_of_sgd_before_anything_changes) {
  const SharedFolder folder;
  {
    const auto model = seeded(1);
    torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    DistributedDataParallel parallel(model, group());
    TrainingState state(parallel, sgd);
    mean_loss(parallel.forward(batch(group().rank(), 0))).backward();
    sgd.step();
    save(folder / "run", state, {.step = 1});
  }
  const auto model = seeded(2);
  MuonWithAdamW muon(MuonWithAdamW::groups_of(model));
  DistributedDataParallel parallel(model, group());
  TrainingState state(parallel, muon);
  const auto before = copies(*model);
  EXPECT_THAT(refusal([&] { load(folder / "run", state); }),
              testing::AllOf(HasSubstr("the optimizer state of first.bias"), HasSubstr("FusedAdamW has no 'step'")));
  EXPECT_EQ(difference(copies(*model), before), 0);
  EXPECT_TRUE(muon.state().empty());
}

// As where one host reads before and another one after a second job has saved to the same place.
TEST(LoadOtherState, BEY05_ranks_that_read_different_checkpoints_are_told) {
  const SharedFolder folder;
  const auto model = seeded(1);
  AdamW optimizer(model->parameters(), AdamWOptions(0.01));
  DistributedDataParallel parallel(model, group());
  TrainingState state(parallel, optimizer);
  for (const std::string run : {"first", "second"}) save(folder / run, state, {.step = 1, .position = run});
  const auto here = std::filesystem::current_path();
  std::filesystem::current_path(folder / (group().rank() == 0 ? "first" : "second"));
  EXPECT_THAT(refusal<CheckpointError>([&] { load("step-1", state); }),
              HasSubstr(group().size() > 1 ? "step-1: ranks have read different ones" : "nothing was refused"));
  std::filesystem::current_path(here);
}

}  // namespace
}  // namespace shoal::test::checkpoint_other_state_test
