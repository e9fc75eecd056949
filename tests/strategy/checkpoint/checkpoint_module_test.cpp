// Checkpoints loaded into modules without a training.

#include <gmock/gmock.h>
#include <torch/optim/sgd.h>

#include "checkpoint/saving/saver.h"
#include "shoal/error.h"
#include "tests/strategy/checkpoint/checkpoint_training.h"
#include "tests/support/models.h"
#include "tests/support/refusal.h"

namespace shoal::test::checkpoint_module_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using torch::optim::SGD;
using torch::optim::SGDOptions;

class BareModule : public testing::TestWithParam<std::string> {};

TEST_P(BareModule, BEY05_takes_what_any_strategy_has_trained) {
  const SharedFolder folder;
  const auto running = start(GetParam(), group(), 1);
  train(*running, group(), 0, 3);
  save(folder / "run", *running->state, {.step = 3});
  Net net(7);
  const auto loaded = load_module(folder / "run", net);
  EXPECT_EQ(loaded.step, 3);
  EXPECT_EQ(loaded.ranks, group().size());
  const CheckpointReader reader(folder / "run");
  for (const auto& entry : net.named_parameters()) {
    EXPECT_TRUE(same_bits(reader.read(entry.key()).to(at::kFloat), entry.value().detach())) << entry.key();
  }
  for (const auto& entry : net.named_buffers()) {
    EXPECT_TRUE(same_bits(reader.read(entry.key()).to(entry.value().scalar_type()), entry.value())) << entry.key();
  }
  net.eval();
  EXPECT_EQ(net.forward(images(0, 1)).sizes(), (std::vector<int64_t>{4, 5}));
}

INSTANTIATE_TEST_SUITE_P(All, BareModule, testing::ValuesIn(all_strategies()),
                         [](const auto& info) { return info.param; });

// Its names are those that a checkpoint gives to what belongs to one rank.
struct WithRanks : torch::nn::Module {
  WithRanks() {
    weight = register_parameter("weight", at::zeros({2}));
    const auto ranks = register_module("ranks", std::make_shared<torch::nn::Module>());
    of_rank = ranks->register_module("0", std::make_shared<torch::nn::Module>())
                  ->register_parameter("weight", at::full({2}, 7.0F));
  }
  at::Tensor weight, of_rank;
};

TEST(TrainingCheckpoint, BEY05_a_partial_load_takes_nothing_of_one_rank_for_the_models) {
  const SharedFolder folder;
  const auto ones = at::ones({2});
  CheckpointSaver(group(), folder / "run")
      .save({.step = 1,
             .strategy = "test",
             .slices = {whole_slice("weight", ones), whole_slice("ranks.0.weight", ones, "ranks")}});
  const auto model = std::make_shared<WithRanks>();
  const auto loaded = load_module(folder / "run", *model, {.partial = true});
  EXPECT_THAT(loaded.differences, ElementsAre("missing: ranks.0.weight"));
  EXPECT_TRUE(at::equal(model->weight, ones));
  EXPECT_TRUE(at::equal(model->of_rank, at::full({2}, 7.0F)));

  SGD optimizer(std::vector<at::Tensor>{model->weight, model->of_rank}, SGDOptions(0.1));
  TrainingState training(model, optimizer, group());
  load(folder / "run", training, {.partial = true});
  EXPECT_TRUE(at::equal(model->of_rank, at::full({2}, 7.0F)));
}

TEST(TrainingCheckpoint, BEY05_a_bare_module_that_does_not_fit_stays_as_it_was) {
  const SharedFolder folder;
  const auto running = start("ddp", group(), 1);
  save(folder / "run", *running->state);
  Mlp other = seeded(1);
  const auto before = other->first->weight.clone();
  EXPECT_THAT(refusal([&] { load_module(folder / "run", other); }),
              AllOf(HasSubstr("missing: first.bias"), HasSubstr("extra: conv.bias")));
  EXPECT_TRUE(at::equal(other->first->weight, before));
  torch::nn::Linear fc(11, 5);
  load_module(folder / "run", fc, {.prefix = "fc."});
  EXPECT_TRUE(at::equal(fc->weight, running->model->fc->weight));
  EXPECT_THROW(load_module(folder / "nothing", fc), CheckpointError);
}

}  // namespace
}  // namespace shoal::test::checkpoint_module_test
