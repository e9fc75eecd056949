// shoal::plan for the built-in models, in all precisions, with all optimizers and compressions, compared with their
// training.

#include <torch/optim/adagrad.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include "data/reference.h"
#include "models/loss.h"
#include "models/registry.h"
#include "shoal/optim.h"
#include "tests/planning/planned_training.h"

namespace shoal::test::built_in_plan_test {
namespace {

using namespace torch::optim;

OptimizerRecipe adamw() {
  return optimizer_recipe<FusedAdamW>(AdamWOptions(1e-3).weight_decay(0.1));
}

void expect_training_does_what_was_planned(const std::string& model, const std::string& dtype,
                                           const OptimizerRecipe& recipe, const std::string& strategy,
                                           const StrategyOptions& options = {}) {
  SCOPED_TRACE(model + ", " + dtype);
  const auto precision = precision_of(strategy, dtype);
  const auto wide = dtype == "float64" ? at::kDouble : at::kFloat;
  const auto make = [&] {
    const auto made = models::make_model(model, "tiny", models::Init::torch, /*seed=*/1, wide);
    precision.convert(*made);
    return made;
  };
  const auto loss = [&](auto& trained, int rank) {
    const auto batch = data::reference_batch(model, "tiny", {.rank = static_cast<uint64_t>(rank)}, 2, wide);
    return models::loss_of(trained.forward(precision.input(batch.data)), batch.target);
  };
  test::expect_training_does_what_was_planned(make, loss, recipe, {.options = options, .precision = precision},
                                              {strategy});
}

TEST(BuiltInPlan, BEY11_every_model_and_precision) {
  for (const auto& strategy : plannable_strategies()) {
    for (const auto* model : {"gpt", "cnn"}) {
      expect_training_does_what_was_planned(model, "float32", adamw(), strategy);
    }
    const auto* bf16 = find_strategy(strategy).main_copies ? "bf16" : "bf16_pure";
    for (const auto* dtype : {"float64", bf16, "bf16_mixed", "fp16_mixed"}) {
      expect_training_does_what_was_planned("mlp", dtype, adamw(), strategy);
    }
  }
  expect_training_does_what_was_planned("cnn", "bf16_pure", adamw(), "ddp");
}

TEST(BuiltInPlan, BEY11_every_optimizer) {
  const std::vector<std::pair<const char*, OptimizerRecipe>> recipes{
      {"sgd", optimizer_recipe<FusedSGD>(SGDOptions(0.05))},
      {"momentum", optimizer_recipe<FusedSGD>(SGDOptions(0.01).momentum(0.9))},
      {"adagrad", optimizer_recipe<FusedAdagrad>(AdagradOptions(1e-2))},
      {"rmsprop", optimizer_recipe<RMSprop>(RMSpropOptions(1e-3))},
      {"lamb", optimizer_recipe<Lamb>(LambOptions(1e-3))},
      {"adafactor", optimizer_recipe<Adafactor>(AdafactorOptions(1e-2))},
      {"accum_adamw", optimizer_recipe<AccumAdamW>(AccumAdamOptions(1e-3).weight_decay(0.1))}};
  for (const auto& strategy : plannable_strategies()) {
    for (const auto& [name, recipe] : recipes) {
      SCOPED_TRACE(name);
      expect_training_does_what_was_planned("mlp", "float32", recipe, strategy);
    }
  }
}

TEST(BuiltInPlan, BEY11_compressed_gradients) {
  for (const auto* compress : {"bf16", "int8", "topk:0.01", "powersgd:2:0", "powersgd:2:2", "powersgd:4"}) {
    SCOPED_TRACE(compress);
    expect_training_does_what_was_planned("gpt", "float32", adamw(), "ddp", {{"compress", compress}});
  }
  for (const auto* strategy : {"zero1", "zero2", "megatron", "fsdp"}) {
    for (const auto* compress : {"fp16", "int8", "topk:0.1"}) {
      SCOPED_TRACE(compress);
      expect_training_does_what_was_planned("mlp", "float32", adamw(), strategy, {{"compress", compress}});
    }
  }
  expect_training_does_what_was_planned("mlp", "float32", adamw(), "zero1", {{"compress", "powersgd:2:1"}});
}

}  // namespace
}  // namespace shoal::test::built_in_plan_test
