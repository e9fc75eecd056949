// Checkpoints of whole trainings: options of param groups.

#include <gmock/gmock.h>
#include <torch/optim/adam.h>

#include "checkpoint/saving/saver.h"
#include "engine/checkpoint/contents.h"
#include "shoal/error.h"
#include "shoal/optim.h"
#include "tests/strategy/checkpoint/param_groups_training.h"
#include "tests/support/refusal.h"

namespace shoal::test::checkpoint_options_test {
namespace {

using namespace param_groups_training;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class ParamGroupOptions : public testing::TestWithParam<std::string> {};

TEST_P(ParamGroupOptions, BEY05_every_option_comes_back_and_training_goes_on) {
  const SharedFolder folder;
  const auto try_optimizer = [&]<class Local>(std::type_identity<Local>, const auto& defaults, const auto& own,
                                              const auto& others) {
    using Chosen = std::decay_t<decltype(defaults)>;
    const auto running = start<Local>(GetParam(), Chosen(defaults), two_groups<Chosen>(own));
    const auto run = folder / typeid(Local).name();
    for (int64_t step = 0; step < 3; ++step) running->step(step);
    running->whole->param_groups()[0].options().set_lr(0.07);
    save(run, *running->state, {.step = 3});
    for (int64_t step = 3; step < 6; ++step) running->step(step);

    const auto resumed = start<Local>(GetParam(), Chosen(others), two_groups<Chosen>(others));
    const auto loaded = load(run, *resumed->state);
    EXPECT_THAT(loaded.differences, IsEmpty());
    EXPECT_TRUE(loaded.exact);
    for (int64_t step = 3; step < 6; ++step) resumed->step(step);
    EXPECT_EQ(difference(resumed->parameters(), running->parameters()), 0) << typeid(Local).name();
  };
  try_optimizer(std::type_identity<SGD>(), fast, of_biases, SGDOptions(1));
  if (GetParam() == "local_updates") return;
  const AdafactorOptions rows = AdafactorOptions(0.05).eps1(1e-6).d(2).beta1(0.5);
  const AdafactorOptions none = AdafactorOptions(0.01).beta1(0.5);
  try_optimizer(std::type_identity<Adafactor>(), rows, none, AdafactorOptions(1).beta1(0.1).eps1(1e-3));
  const LambOptions lamb = LambOptions(0.05).betas({0.8, 0.7}).bias_correction(false);
  try_optimizer(std::type_identity<Lamb>(), lamb, LambOptions(0.01).always_adapt(false), LambOptions(1));
}

// Param groups in another order and composition; other strategies.
TEST_P(ParamGroupOptions, BEY05_options_follow_parameters_into_other_groups) {
  const SharedFolder folder;
  const auto running = start<SGD>("ddp", fast, two_groups(of_biases));
  for (int64_t step = 0; step < 2; ++step) running->step(step);
  save(folder / "run", *running->state);
  const auto turned = [](Mlp& model) {
    Groups groups;
    for (const auto& parameter : model->parameters()) groups.emplace_back(std::vector<at::Tensor>{parameter});
    return groups;
  };
  const auto resumed = start<SGD>(GetParam(), SGDOptions(1), turned);
  const auto loaded = load(folder / "run", *resumed->state);
  EXPECT_THAT(loaded.differences, IsEmpty());
  for (size_t i = 0; i < resumed->model->parameters().size(); ++i) {
    const auto& options = static_cast<const SGDOptions&>(resumed->whole->param_groups()[i].options());
    const bool bias = resumed->model->parameters()[i].dim() == 1;
    EXPECT_EQ(options.lr(), bias ? 0.3 : 0.1);
    EXPECT_EQ(options.momentum(), bias ? 0.5 : 0.9);
    EXPECT_EQ(options.dampening(), bias ? 0.1 : 0);
    EXPECT_TRUE(options.nesterov());
  }
  const auto together = start<SGD>(GetParam(), SGDOptions(1), [](Mlp& model) {
    Groups groups;
    groups.emplace_back(model->parameters());
    return groups;
  });
  const auto mixed = load(folder / "run", *together->state);
  EXPECT_FALSE(mixed.exact);
  EXPECT_THAT(mixed.differences, ElementsAre(HasSubstr("param group 0: its parameters had different options")));
  EXPECT_EQ(together->whole->param_groups()[0].options().get_lr(), 1);
}

INSTANTIATE_TEST_SUITE_P(All, ParamGroupOptions, testing::Values("ddp", "zero1", "megatron", "fsdp", "local_updates"),
                         [](const auto& info) { return info.param; });

TEST(TrainingCheckpoint, BEY05_options_that_differ_are_named) {
  const SharedFolder folder;
  const auto running = start<SGD>("zero1", fast, two_groups(of_biases));
  running->step(0);
  save(folder / "run", *running->state);
  const SGDOptions here = SGDOptions(0.01).momentum(0.9).weight_decay(0.2);
  {
    const auto resumed = start<SGD>("zero1", here, two_groups(of_biases));
    const auto loaded = load(folder / "run", *resumed->state, {.options = false});
    EXPECT_FALSE(loaded.exact);
    EXPECT_THAT(loaded.differences, ElementsAre("param group 0: nesterov is false, in the checkpoint true",
                                                "param group 1: nesterov is false, in the checkpoint true"));
    EXPECT_EQ(resumed->whole->param_groups()[0].options().get_lr(), 0.1);
  }
  {
    const auto resumed = start<SGD>("zero1", here, two_groups(of_biases));
    const auto loaded = load(folder / "run", *resumed->state, {.rates = false});
    EXPECT_THAT(loaded.differences, ElementsAre("param group 0: lr is 0.01, in the checkpoint 0.1"));
    EXPECT_EQ(resumed->whole->param_groups()[0].options().get_lr(), 0.01);
  }
  {  // a command line that says the same again
    const auto resumed = start<SGD>("zero1", fast, two_groups(of_biases));
    EXPECT_TRUE(load(folder / "run", *resumed->state, {.rates = false, .options = false}).exact);
  }
  // Adam's weight decay differs from AdamW's, although their states have the same fields.
  const torch::optim::AdamOptions adam = torch::optim::AdamOptions(0.02).weight_decay(0.5);
  const auto with_adam = start<torch::optim::Adam>("ddp", adam, two_groups(adam));
  with_adam->step(0);
  save(folder / "adam", *with_adam->state);
  const torch::optim::AdamWOptions adamw(0.01);
  const auto with_adamw = start<torch::optim::AdamW>("ddp", adamw, two_groups(adamw));
  const auto loaded = load(folder / "adam", *with_adamw->state);
  EXPECT_FALSE(loaded.exact);
  ASSERT_EQ(loaded.differences.size(), 2U);
  EXPECT_THAT(loaded.differences[0], AllOf(HasSubstr("AdamWOptions"), HasSubstr("AdamOptions")));
  EXPECT_EQ(with_adamw->whole->param_groups()[0].options().get_lr(), 0.02);
}

// Older checkpoints: rates by param group, and the position of one schedule.
TEST(TrainingCheckpoint, BEY05_checkpoints_that_have_rates_alone_still_load) {
  const SharedFolder folder;
  const auto model = std::make_shared<Net>(1);
  FusedAdamW optimizer(trainable(*model), adamw);
  LinearWarmup schedule(optimizer, 10);
  TrainingState training(model, optimizer, group());
  training.with(schedule);
  auto contents = contents_of(*checkpoint_source(model, optimizer, group()), group(), {}, {.step = 3});
  contents.global_state.erase("param_groups");
  contents.global_state["rates"] = {0.125};
  CheckpointSaver(group(), folder / "run").save(contents);
  auto without_rates = contents;
  without_rates.global_state.erase("rates");
  CheckpointSaver(group(), folder / "without").save(without_rates);
  contents.global_state["schedule"] = 4;
  CheckpointSaver(group(), folder / "scheduled").save(contents);

  const auto expect_named = [](const Loaded& loaded) {
    EXPECT_FALSE(loaded.exact);
    EXPECT_THAT(loaded.differences, testing::Contains(HasSubstr("no options of param groups but learning rates")));
  };
  expect_named(load(folder / "scheduled", training));
  EXPECT_EQ(schedule.position(), 4);
  FusedAdamW plain(trainable(*model), adamw);
  TrainingState without(model, plain, group());
  expect_named(load(folder / "run", without));
  EXPECT_EQ(plain.param_groups()[0].options().get_lr(), 0.125);
  EXPECT_EQ(static_cast<const torch::optim::AdamWOptions&>(plain.param_groups()[0].options()).weight_decay(), 0.1);
  const auto bare = load(folder / "without", without);
  EXPECT_FALSE(bare.exact);
  EXPECT_THAT(bare.differences, ElementsAre("the checkpoint has no options of param groups; they keep theirs"));
}

TEST(TrainingCheckpoint, BEY05_options_that_are_not_what_shoal_writes_are_refused) {
  const SharedFolder folder;
  const auto model = std::make_shared<Net>(1);
  FusedAdamW optimizer(trainable(*model), adamw);
  TrainingState training(model, optimizer, group());
  auto contents = contents_of(*checkpoint_source(model, optimizer, group()), group(), {}, {});
  const auto good = contents.global_state.at("param_groups");
  const auto before = model->fc->weight.clone();
  const std::vector<nlohmann::json> bad{
      {{"lr", "fast"}}, {{"betas", {0.9}}}, {{"betas", {0.9, true}}}, {{"eps", nullptr}}, nullptr};
  for (const auto& options : bad) {
    contents.step += 1;
    contents.global_state["param_groups"] = good;
    contents.global_state["param_groups"][0]["options"].update(options.is_null() ? nlohmann::json::object() : options);
    if (options.is_null()) contents.global_state["param_groups"][0]["options"] = 5;
    CheckpointSaver(group(), folder / "run").save(contents);
    EXPECT_THAT(refusal<CheckpointError>([&] { load(folder / "run", training); }), HasSubstr("\"param_groups\""))
        << options;
  }
  EXPECT_TRUE(at::equal(model->fc->weight, before));
  EXPECT_EQ(static_cast<const torch::optim::AdamWOptions&>(optimizer.param_groups()[0].options()).eps(), 1e-8);
}

}  // namespace
}  // namespace shoal::test::checkpoint_options_test
