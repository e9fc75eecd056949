// shoal::plan for a module of a program's own, compared with its training.

#include "shoal/plan.h"

#include <gmock/gmock.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/sgd.h>

#include <sstream>

#include "shoal/optim.h"
#include "tests/planning/own_module.h"
#include "tests/planning/planned_training.h"
#include "tests/support/refusal.h"
#include "tests/support/world.h"

namespace shoal::test {
namespace {

using testing::HasSubstr;

const StrategyOptions small{{"bucket_cap_mb", "0.1"},
                            {"first_bucket_mb", "0.02"},
                            {"bucket_size", "9000"},
                            {"reduce_buffer_size", "9000"},
                            {"unit_numel", "9000"}};

std::shared_ptr<OwnModule> made() {
  torch::manual_seed(1);
  return std::make_shared<OwnModule>();
}

void expect_own_training_does_what_was_planned(const OptimizerRecipe& recipe, const StrategyOptions& options) {
  expect_training_does_what_was_planned(made, [](auto& model, int rank) { return own_loss(model, rank); }, recipe,
                                        {.options = options});
}

TEST(OwnPlan, SCA03_BEY20_is_what_the_training_of_ones_own_module_does) {
  expect_own_training_does_what_was_planned(optimizer_recipe<torch::optim::AdamW>(1e-3), {});
  expect_own_training_does_what_was_planned(optimizer_recipe<FusedAdamW>(1e-3), small);
}

TEST(OwnPlan, SCA03_follows_the_optimizer_and_the_options) {
  auto options = small;
  options["compress"] = "bf16";
  expect_own_training_does_what_was_planned(
      optimizer_recipe<torch::optim::SGD>(torch::optim::SGDOptions(0.1).momentum(0.9)), options);
  expect_own_training_does_what_was_planned(optimizer_recipe<Adafactor>(1e-2), small);  // its state depends on shapes
}

// As if each half of the ranks had a host of its own.
TEST(OwnPlan, ELA04_SCA03_counts_what_hosts_send_that_each_have_all_shards) {
  if (group().size() % 2 != 0 || group().transport() != "host") GTEST_SKIP() << "no two halves that share memory";
  StrategyOptions options{{"unit_numel", "9000"}, {"shard_size", std::to_string(group().size() / 2)}};
  const auto halves = [&](const OptimizerRecipe& recipe) {
    expect_training_does_what_was_planned(
        made, [](auto& model, int rank) { return own_loss(model, rank); }, recipe, {.options = options}, {"hybrid"}, 2);
  };
  halves(optimizer_recipe<FusedAdamW>(1e-3));
  halves(optimizer_recipe<Adafactor>(1e-2));
  options["compress"] = "bf16";  // between the halves
  halves(optimizer_recipe<FusedAdamW>(1e-3));
}

TEST(OwnPlan, SCA03_leaves_the_module_and_the_random_numbers_as_they_were) {
  const auto module = made();
  own_loss(*module, 0).backward();
  std::vector<at::Tensor> before;
  for (const auto& parameter : module->parameters()) before.push_back(parameter.grad());
  const auto values = module->wide->weight.grad().clone();
  const auto mean = module->norm->running_mean.clone();
  torch::manual_seed(5);
  const auto expected = at::rand({3});
  torch::manual_seed(5);
  plan(module, optimizer_recipe<torch::optim::AdamW>(1e-3),
       {.strategies = {"ddp"},
        .loss = [&] { return at::dropout(own_loss(*module, 0) * at::ones({1}), 0.5, true).sum(); }});
  EXPECT_TRUE(at::equal(at::rand({3}), expected));
  EXPECT_TRUE(at::equal(module->norm->running_mean, mean));
  EXPECT_TRUE(at::equal(module->wide->weight.grad(), values));
  for (size_t i = 0; i < before.size(); ++i) {
    EXPECT_TRUE(before[i].defined() ? module->parameters()[i].grad().is_same(before[i])
                                    : !module->parameters()[i].grad().defined());
  }
}

TEST(OwnPlan, SCA03_has_one_row_for_each_strategy) {
  const auto planned = plan(made(), optimizer_recipe<torch::optim::AdamW>(1e-3), {.ranks = 8, .hosts = 2});
  std::ostringstream shown;
  shown << planned;
  EXPECT_EQ(shown.str(), planned.table());
  EXPECT_THAT(shown.str(),
              testing::StartsWith("strategy    parameters   gradients       state     buffers   all ranks"));
  for (const auto& name : plannable_strategies()) EXPECT_THAT(shown.str(), HasSubstr("\n" + name));
  const auto elements = 200 * 64 + 64 * 256 + 256 + 2 * 256 + 256 * 64 + 64;
  EXPECT_EQ(planned.strategies.front().largest().state, 8 * elements) << "two moments in float32";
  const auto& hybrid = planned.strategies.back();
  EXPECT_LT(planned.strategies.end()[-2].largest().state, 8 * elements / 7) << "an eighth";
  EXPECT_LT(hybrid.largest().state, 8 * elements / 3) << "a quarter";
  EXPECT_EQ(hybrid.between_hosts.bytes, hybrid.largest().gradients) << "each rank's shard";
  EXPECT_THAT(shown.str(), HasSubstr("are between hosts"));
  EXPECT_TRUE(hybrid.parameters_once);
  EXPECT_FALSE(planned.strategies[1].parameters_once) << "zero1 over two hosts";
}

TEST(OwnPlan, SCA03_what_cannot_be_planned_is_refused_in_one_sentence) {
  const auto module = made();
  const auto recipe = optimizer_recipe<torch::optim::AdamW>(1e-3);
  const auto said = [&](PlanOptions options) { return refusal([&] { plan(module, recipe, options); }); };
  EXPECT_THAT(said({.strategies = {"local"}}),
              "plan: strategy 'local' cannot be planned; choose from ddp, zero1, megatron, zero2, fsdp, hybrid");
  EXPECT_THAT(said({.ranks = 4, .hosts = 3}), "plan: 4 ranks on 3 hosts; give a number of hosts that divides them");
  EXPECT_THAT(said({.ranks = 0}), "plan: 0 ranks; give at least 1");
  EXPECT_THAT(said({.training = {.options = {{"bucket_cap", "1"}}}}),
              HasSubstr("plan: option bucket_cap: none of ddp, "));
  EXPECT_THAT(said({.strategies = {"zero2"}, .training = {.options = {{"compress", "powersgd:2"}}}}),
              HasSubstr("it is for ddp, zero1"));
  EXPECT_THAT(said({.loss = [&] { return module->forward(own_tokens(0)); }}),
              "plan: the loss is a tensor of shape [8, 200]; return one number, such as the mean over the samples");
  EXPECT_THAT(said({.loss = [&] { return own_loss(*module, 0).detach(); }}), HasSubstr("the loss has no gradient"));
  EXPECT_THAT(said({.loss = [] { return at::Tensor(); }}), HasSubstr("the loss is no tensor"));
  EXPECT_THAT(refusal([&] { plan(nullptr, recipe); }), "plan: there is no module");
  EXPECT_THAT(refusal([&] { plan(module, OptimizerRecipe()); }), HasSubstr("take optimizer_recipe()"));
  auto partial = recipe;
  partial.groups = [](const torch::nn::Module&) {
    OptimizerRecipe::ParamGroups groups;
    groups.emplace_back(std::vector<at::Tensor>{at::ones({1}).requires_grad_()});
    return groups;
  };
  EXPECT_THAT(refusal([&] { plan(module, partial); }),
              "plan: the recipe's param groups leave out parameter tied, which is trainable; add it to a group, or "
              "freeze it");
}

}  // namespace
}  // namespace shoal::test
