// Which parts a training is given as, and what ranks must hold alike.

#include <gmock/gmock.h>
#include <torch/optim/sgd.h>

#include "shoal/checkpoint.h"
#include "shoal/ddp.h"
#include "shoal/fsdp.h"
#include "shoal/local_updates.h"
#include "shoal/megatron.h"
#include "shoal/optim.h"
#include "shoal/optimizer_state.h"
#include "shoal/zero.h"
#include "tests/support/models.h"
#include "tests/support/refusal.h"
#include "tests/support/shared_folder.h"
#include "tests/support/world.h"

namespace shoal::checkpoint_parts_test {
namespace {

using test::batch;
using test::group;
using test::mean_loss;
using test::refusal;
using test::seeded;
using test::SharedFolder;
using testing::AllOf;
using testing::HasSubstr;

const torch::optim::AdamWOptions adamw(1e-2);

template <class Optimizer>
void expect_refused(test::Mlp model, Optimizer& optimizer) {
  torch::optim::Optimizer& base = optimizer;
  const auto refused = HasSubstr("this one is sharded: give an OSS by its own type with its wrapper");
  EXPECT_THAT(refusal([&] { TrainingState training(model, optimizer, group()); }), refused);
  EXPECT_THAT(refusal([&] { TrainingState training(model, base, group()); }), refused);
  EXPECT_THAT(refusal([&] { optimizer_state(optimizer, *model); }), HasSubstr("use its own state_dict()"));
  EXPECT_THAT(refusal([&] { load_optimizer_state(base, *model, {}); }), HasSubstr("use its own load_state_dict()"));
}

TEST(TrainingParts, BEY05_a_sharded_optimizer_given_as_a_whole_one_is_refused) {
  {
    const auto model = seeded(3);
    OSS<FusedAdamW> optimizer(model->parameters(), adamw, group());
    DistributedDataParallel parallel(model, group());
    expect_refused(model, optimizer);
    torch::optim::Optimizer& base = optimizer;
    EXPECT_THAT(refusal([&] { TrainingState training(parallel, base); }), HasSubstr("this one is sharded"));
    const TrainingState right(parallel, optimizer);
  }
  {
    const auto model = seeded(3);
    DistributedOptimizer<FusedAdamW> optimizer(model, adamw, group());
    expect_refused(model, optimizer);
  }
  const auto model = seeded(3);
  FullyShardedDataParallel parallel(model, group());
  FullyShardedOptimizer<FusedAdamW> optimizer(parallel, adamw);
  expect_refused(model, optimizer);
}

std::string save_refusal(const std::filesystem::path& run, TrainingState& training) {
  return refusal<DisagreeError>([&] { save(run, training, {.step = 1}); });
}

TEST(TrainingParts, BEY05_an_inner_optimizer_of_local_training_saves_no_mixture) {
  const SharedFolder folder;
  auto model = seeded(3);
  torch::optim::SGD inner(model->parameters(), torch::optim::SGDOptions(0.1));
  LocalUpdates updates(model, inner, group(), {.every = 50});
  mean_loss(model->forward(batch(group().rank(), 0))).backward();
  updates.step();
  TrainingState wrong(model, inner, group());
  const auto text = save_refusal(folder / "wrong", wrong);
  if (group().size() > 1) {
    EXPECT_THAT(text, AllOf(HasSubstr("give LocalUpdates or DecentralizedDataParallel itself to TrainingState"),
                            HasSubstr("ranks have different values of first.weight, up to ")));
  } else {
    EXPECT_EQ(text, "nothing was refused");
  }
  TrainingState right(updates);
  EXPECT_EQ(save_refusal(folder / "right", right), "nothing was refused");
}

TEST(TrainingParts, BEY05_replicas_that_have_drifted_apart_save_no_mixture) {
  const SharedFolder folder;
  const auto model = seeded(3);
  DistributedDataParallel parallel(model, group());
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  mean_loss(parallel.forward(batch(group().rank(), 0))).backward();
  optimizer.step();
  TrainingState training(parallel, optimizer);
  const auto& bias = model->second->bias;
  const torch::NoGradGuard no_grad;
  const bool last = group().size() > 1 && group().rank() + 1 == group().size();
  if (last) bias.add_(1);
  const auto expected =
      group().size() > 1 ? HasSubstr("different values of second.bias, up to 1 apart") : HasSubstr("nothing");
  EXPECT_THAT(save_refusal(folder / "run", training), expected);
  group().broadcast(bias, 0).wait();
  if (last) bias.mul_(1 + 1e-6);
  EXPECT_EQ(save_refusal(folder / "run", training), "nothing was refused") << "equal again, but for rounding";
  group().broadcast(bias, 0).wait();
  // Optimizers may keep the state of a parameter on one rank alone.
  if (last) optimizer.state().erase(bias.unsafeGetTensorImpl());
  EXPECT_EQ(save_refusal(folder / "run", training), "nothing was refused");
}

TEST(TrainingParts, BEY05_frozen_parameters_of_a_module_without_a_wrapper_are_each_ranks) {
  const SharedFolder folder;
  const auto model = seeded(3);
  model->third->bias.set_requires_grad(false).fill_(group().rank());
  std::vector<at::Tensor> trained{model->first->weight};
  torch::optim::SGD optimizer(trained, torch::optim::SGDOptions(0.1));
  TrainingState training(model, optimizer, group());
  model->second->weight.set_requires_grad(false);
  save(folder / "run", training, {.step = 1});
  model->third->bias.zero_();
  EXPECT_TRUE(load(folder / "run", training).exact);
  EXPECT_TRUE((model->third->bias == group().rank()).all().item<bool>());
}

TEST(TrainingParts, BEY06_the_program_may_change_its_folder_during_a_save) {
  const SharedFolder folder;
  const auto model = seeded(3);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
  TrainingState training(model, optimizer, group());
  const auto before = std::filesystem::current_path();
  std::filesystem::create_directories(folder / "other");
  std::filesystem::current_path(folder / "other");
  save_async("../run", training, {.step = 1});
  std::filesystem::current_path(folder / "other/..");
  training.wait();
  std::filesystem::current_path(before);
  EXPECT_EQ(load(folder / "run", training).step, 1);
}

}  // namespace
}  // namespace shoal::checkpoint_parts_test
