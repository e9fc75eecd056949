// Change of strategy and precision between two steps, in memory (BEY15): what goes over and what it costs. Refusals are
// in replan_refused_test.cpp, chains of changes and of ranks in replan_chain_test.cpp.

#include <gtest/gtest.h>

#include "shoal/schedules.h"
#include "tests/support/memory_meter.h"
#include "tests/training/replan_training.h"

namespace shoal::replan_test {
namespace {

using namespace replan_training;

TEST(Replan, BEY15_precision_changes_with_exact_main_copies) {
  torch::manual_seed(3);
  auto training = make_training("ddp", test::Mlp(12, 16, 5, at::kFloat), adamw(), group());
  steps(training, 0, 2);
  const auto before = whole(training);
  const auto state = training->optimizer_state();
  auto options = TrainingOptions{.precision = precision_of("megatron", "bf16_mixed")};
  training.replan("megatron", options);
  EXPECT_EQ(training.module()->first->weight.scalar_type(), at::kBFloat16);
  training.replan("fsdp");
  EXPECT_EQ(training.module()->first->weight.scalar_type(), at::kBFloat16) << "bf16_mixed is the same there";
  training.replan("ddp", {.precision = Precision::float32()});
  expect_equal(whole(training), before);
  expect_equal(training->optimizer_state(), state);
  training.replan("fsdp", {.precision = precision_of("fsdp", "bf16_mixed")});
  steps(training, 2, 4);
  training.replan("zero1");
  EXPECT_EQ(training->precision().compute, at::kBFloat16) << "bf16_mixed is autocast there";
  EXPECT_EQ(training.module()->first->weight.scalar_type(), at::kFloat);
  steps(training, 4, 5);
  training.replan("ddp", {.precision = precision_of("ddp", "bf16_pure")});
  training.replan("fsdp");
  EXPECT_EQ(training.module()->first->weight.scalar_type(), at::kBFloat16) << "FSDP has no bf16_pure";
}

TEST(Replan, BEY15_the_loss_scaler_goes_over) {
  torch::manual_seed(3);
  auto training = make_training("ddp", test::Mlp(12, 16, 5, at::kFloat), adamw(), group(),
                                {.clip_grad = 0.5, .precision = precision_of("ddp", "fp16_mixed")});
  const auto scale_of = [&] { return training->scale_loss(at::ones({})).item<double>(); };
  const auto first = scale_of();
  for (int i = 0; i < 3; ++i) {
    auto infinite = training.forward(test::batch(group().rank(), i).to(at::kFloat)).sum() * INFINITY;
    training->backward(infinite);
    EXPECT_FALSE(training->step());
    training->zero_grad();
  }
  const auto scale = scale_of();
  EXPECT_LT(scale, first);
  for (const auto* name : {"megatron", "fsdp", "zero2", "ddp"}) {
    training.replan(name);
    EXPECT_EQ(scale_of(), scale) << name;
    step(training, 5);
  }
}

TEST(Replan, BEY15_a_schedule_moves_to_the_new_optimizer) {
  auto training = make_training("ddp", net(3), adamw(), group());
  std::unique_ptr<LambdaLR> schedule = std::make_unique<CosineWithWarmup>(
      training->optimizer(), CosineWithWarmupOptions{.total_steps = 10, .warmup_steps = 3});
  const auto rate = [&] { return training->optimizer().param_groups().front().options().get_lr(); };
  auto other = make_training("ddp", net(3), adamw(), group());
  CosineWithWarmup expected(other->optimizer(), {.total_steps = 10, .warmup_steps = 3});
  const std::vector<std::string> names{"fsdp", "megatron", "zero2", "local_sgd", "ddp"};
  for (size_t i = 0; i < names.size(); ++i) {
    step(training, i);
    schedule->step();
    expected.step();
    const auto before = rate();
    training.replan(names[i]);
    EXPECT_EQ(rate(), before) << "learning rates go over";
    schedule = schedule->on(training->optimizer());
    EXPECT_EQ(rate(), before);
    EXPECT_EQ(schedule->position(), expected.position());
    EXPECT_EQ(rate(), other->optimizer().param_groups().front().options().get_lr());
  }
  torch::optim::SGD two({torch::optim::OptimizerParamGroup({at::ones({1}, at::requires_grad())}),
                         torch::optim::OptimizerParamGroup({at::ones({1}, at::requires_grad())})},
                        0.1);
  EXPECT_THROW(static_cast<void>(schedule->on(two)), UsageError);
}

TEST(Replan, BEY15_twice_in_a_row_and_before_the_first_step) {
  auto training = make_training("fsdp", net(3), adamw(), group(), options_of("fsdp"));
  const auto before = whole(training);
  training.replan("zero1", options_of("zero1"));
  training.replan("megatron", options_of("megatron"));
  training.replan("megatron", options_of("megatron"));
  expect_equal(whole(training), before);
  steps(training, 0, 2);
  auto straight = make_training("megatron", net(3), adamw(), group(), options_of("megatron"));
  steps(straight, 0, 2);
  if (sums_in_rank_order()) expect_equal(whole(training), whole(straight));
}

TEST(Replan, BEY15_param_groups_keep_their_options) {
  const auto groups = [](const torch::nn::Module& module) {
    OptimizerRecipe::ParamGroups list;
    list.emplace_back(std::vector{module.named_parameters()["first.weight"], module.named_parameters()["gain"]});
    std::vector<at::Tensor> rest;
    for (const auto& entry : module.named_parameters()) {
      const bool listed = entry.key() == "first.weight" || entry.key() == "gain" || entry.key() == "tied";
      if (!listed && entry.value().requires_grad()) rest.push_back(entry.value());
    }
    list.emplace_back(rest);
    list.back().set_options(
        std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(5e-3).weight_decay(0)));
    return list;
  };
  const auto recipe = optimizer_recipe<FusedAdamW>(torch::optim::AdamWOptions(1e-2), groups);
  auto training = make_training("zero1", net(3), recipe, group(), options_of("zero1"));
  steps(training, 0, 1);
  training->optimizer().param_groups()[1].options().set_lr(4e-3);
  for (const auto* name : {"fsdp", "ddp", "megatron", "zero2"}) {
    training.replan(name, options_of(name));
    const auto& now = training->optimizer().param_groups();
    ASSERT_EQ(now.size(), 2U);
    EXPECT_EQ(now[0].options().get_lr(), 1e-2) << name;
    EXPECT_EQ(now[1].options().get_lr(), 4e-3) << name;
    EXPECT_EQ(static_cast<const torch::optim::AdamWOptions&>(now[1].options()).weight_decay(), 0) << name;
    step(training, 1);
  }
}

TEST(Replan, BEY15_what_shoal_ignores_stays_as_it_is) {
  auto options = options_of("ddp");
  options.ignored = {"frozen.weight", "frozen.bias"};
  auto training = make_training("ddp", net(3), adamw(), group(), options);
  auto& own = training.module()->frozen->weight;
  own.mutable_grad() = at::ones_like(own);
  const auto value = own.detach().clone();
  const auto* data = own.const_data_ptr();
  for (const auto* name : {"fsdp", "megatron", "ddp"}) {
    auto next = options_of(name);
    next.ignored = options.ignored;
    steps(training, 0, 1);
    training.replan(name, next);
    EXPECT_EQ(own.const_data_ptr(), data);
    EXPECT_TRUE(at::equal(own, value));
    EXPECT_TRUE(own.grad().defined());
  }
}

TEST(Replan, BEY15_optimizers_of_whole_parameters_need_a_strategy_that_has_them) {
  const auto lamb = optimizer_recipe<Lamb>(LambOptions(1e-2));
  auto training = make_training("zero1", net(3), lamb, group(), options_of("zero1"));
  auto straight = make_training("fsdp", net(3), lamb, group(), options_of("fsdp"));
  steps(training, 0, 2);
  training.replan("fsdp", options_of("fsdp"));
  steps(straight, 0, 2);
  if (sums_in_rank_order()) expect_equal(training->optimizer_state(), straight->optimizer_state());
  training.replan("megatron", options_of("megatron"));
  steps(training, 2, 3);
  steps(straight, 2, 3);
  if (sums_in_rank_order()) expect_equal(parameters_of(training), parameters_of(straight));
}

// Beyond what the training has before: a copy of the rank's share of the parameters and the new state, which is two
// shares; a unit of parameters is whole, and sent, while it is sharded. Pages and buckets of the old strategy are gone
// by then.
TEST(Replan, BEY15_memory_is_a_share_of_the_parameters_and_the_new_state) {
  constexpr int64_t hidden = 1024;
  constexpr double unit = hidden * hidden * sizeof(float);
  torch::manual_seed(3);
  const TrainingOptions options{.options = {{"unit_numel", "1000"}}};
  auto training = make_training("fsdp", test::Mlp(12, hidden, 5, at::kFloat), adamw(), group(), options);
  double bytes = 0;
  for (const auto& parameter : training.module()->parameters()) bytes += parameter.numel() * sizeof(float);
  const auto share = bytes / group().size();
  step(training, 0);
  auto& meter = test::MemoryMeter::instance();
  training.replan("fsdp", options);  // the meter knows blocks from now on
  step(training, 1);
  meter.reset_peak();
  const auto before = meter.live();
  const auto done = training.replan("fsdp_grad_op", options);
  const auto extra = static_cast<double>(meter.peak() - before);
  EXPECT_LT(extra, 3 * share + 2 * unit + (1 << 20)) << "share " << share << ", unit " << unit;
  EXPECT_GT(extra, share / 2) << "the meter measures";
  EXPECT_LE(done.bytes, 3 * bytes);
}

}  // namespace
}  // namespace shoal::replan_test
