// Options of trainings that the registry makes: what is left out of the norm, and what is refused.

#include <gmock/gmock.h>
#include <torch/nn/utils/clip_grad.h>

#include "shoal/schedules.h"
#include "shoal/training.h"
#include "tests/support/models.h"
#include "tests/support/refusal.h"
#include "tests/support/world.h"
#include "tests/training/whole_batch.h"

namespace shoal::test::training_options_test {
namespace {

using namespace whole_batches;  // NOLINT(google-build-using-namespace): helpers of this folder's tests

// A rank trains its own layer itself, with gradients that are no other rank's.
TEST(Training, ignored_parameters_do_not_count_in_the_norm) {
  TrainingOptions options{.clip_grad = largest_norm};
  options.ignored = {"first.weight", "first.bias"};
  auto training = make_training("ddp", seeded(3), optimizer_recipe<FusedSGD>(sgd), group(), options);
  const auto& own = training.module()->first->weight;
  for (int64_t step = 0; step < 3; ++step) {
    training->backward(mean_loss(training(batch(group().rank(), step))) * (1 + group().rank()));
    const auto before = own.grad().clone();
    training->step();
    EXPECT_TRUE(at::equal(own.grad(), before)) << "left to the program";
    training->zero_grad();
  }
  for (const auto& entry : training.module()->named_parameters()) {
    if (entry.key().starts_with("first.")) continue;
    auto first = entry.value().detach().clone();
    group().broadcast(first, 0).wait();
    EXPECT_TRUE(at::equal(first, entry.value())) << entry.key() << " differs on rank " << group().rank();
  }
}

TEST(Training, a_tied_parameter_is_ignored_by_any_of_its_names) {
  for (const auto* strategy : {"ddp", "zero1", "local_sgd"}) {
    for (const auto* name : {"second.weight", "again.weight"}) {
      auto model = seeded(3);
      model->register_module("again", model->second);
      const auto before = model->second->weight.detach().clone();
      auto training =
          make_training(strategy, model, optimizer_recipe<torch::optim::SGD>(sgd), group(), {.ignored = {name}});
      training->backward(mean_loss(training(batch(group().rank(), 0))));
      training->step();
      EXPECT_TRUE(at::equal(model->second->weight, before)) << strategy << " has trained " << name;
    }
  }
}

// libtorch's parameters() are such a list if a submodule has two names.
TEST(Training, a_parameter_that_is_listed_twice_is_unscaled_and_clipped_once) {
  const auto twice = [](const torch::nn::Module& module) {
    auto list = module.parameters();
    list.push_back(list.front());
    OptimizerRecipe::ParamGroups groups;
    groups.emplace_back(std::move(list));
    return groups;
  };
  auto model = seeded(3);
  mean_loss(model->forward(whole_batch(0, 0))).backward();
  torch::nn::utils::clip_grad_norm_(model->parameters(), largest_norm);
  TrainingOptions options{.clip_grad = largest_norm};
  options.precision.scaler = GradScalerOptions{.initial_scale = 1024};
  for (const auto* strategy : {"ddp", "local", "local_sgd"}) {
    auto training =
        make_training(strategy, seeded(3), optimizer_recipe<torch::optim::SGD>(sgd, twice), group(), options);
    training->backward(mean_loss(training(whole_batch(0, 0))));
    training->step();
    EXPECT_LT(difference(gradients(*training.module()), gradients(*model)), 1e-9) << strategy;
  }
}

TEST(Training, wrong_options_are_refused_on_every_rank) {
  const auto make = [](const std::string& name, const StrategyOptions& options, double clip) {
    make_training(name, seeded(3), optimizer_recipe<FusedSGD>(sgd), group(), {.options = options, .clip_grad = clip});
  };
  EXPECT_THROW(make("zero9", {}, 0), UsageError);
  EXPECT_THROW(make("ddp", {{"unit_numel", "5"}}, 0), StrategyOptionError);
  EXPECT_THROW(make("ddp", {}, -1), UsageError);
}

TEST(Training, what_would_have_no_effect_is_refused) {
  const auto refusal = [](const std::string& name, const OptimizerRecipe& recipe, const TrainingOptions& options) {
    try {
      make_training(name, seeded(3), recipe, group(), options);
    } catch (const UsageError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  const auto recipe = optimizer_recipe<FusedSGD>(sgd);
  const auto hook = std::make_shared<CompressHook>(at::kBFloat16);
  const ScheduleFactory schedule = [](torch::optim::Optimizer& optimizer) {
    return std::make_unique<LinearWarmup>(optimizer, 10);
  };
  for (const auto* name : {"ddp", "zero2", "fsdp", "megatron", "local_sgd"}) {
    EXPECT_THAT(refusal(name, recipe, {.schedule = schedule}), testing::HasSubstr("takes no schedule")) << name;
    EXPECT_THAT(refusal(name, {}, {}), testing::HasSubstr("lacks `make` or `defaults`")) << name;
  }
  for (const auto* name : {"decentralized", "local_sgd", "local"}) {
    EXPECT_THAT(refusal(name, recipe, {.communication_hook = hook}), testing::HasSubstr("reduces no gradients"))
        << name;
  }
  EXPECT_THAT(refusal("ddp", recipe, {.options = {{"compress", "fp16"}}, .communication_hook = hook}),
              testing::HasSubstr("exclude each other"));
}

TEST(Training, a_recipe_takes_a_learning_rate_alone) {
  auto training = make_training("zero1", seeded(3), optimizer_recipe<torch::optim::SGD>(0.05), group());
  training->backward(mean_loss(training(whole_batch(0, 0))));
  training->step();
  auto model = seeded(3);
  torch::optim::SGD optimizer(model->parameters(), 0.05);
  mean_loss(model->forward(whole_batch(0, 0))).backward();
  optimizer.step();
  EXPECT_LT(difference(training.module()->parameters(), model->parameters()), 1e-12);
}

}  // namespace
}  // namespace shoal::test::training_options_test
