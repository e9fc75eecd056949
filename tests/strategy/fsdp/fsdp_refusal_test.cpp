// Errors of FullyShardedDataParallel.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/cuda.h>
#include <torch/nn/module.h>
#include <torch/optim/lbfgs.h>

#include "shoal/error.h"
#include "tests/strategy/fsdp/fsdp_training.h"
#include "tests/support/refusal.h"

namespace shoal::test::fsdp_refusal_test {
namespace {

std::string refused(const std::shared_ptr<MlpImpl>& module, const Options& options) {
  return refusal([&] { FullyShardedDataParallel<MlpImpl>(module, group(), options); });
}

TEST(Fsdp, FSDP13_the_module_is_where_the_device_option_says_or_an_error_says_why_not) {
  const auto model = make_mlp();
  model->to(at::kCPU);
  FullyShardedDataParallel<MlpImpl> parallel(model, group(), {.device = test_device()});
  FullyShardedOptimizer<torch::optim::SGD> optimizer(parallel, sgd);
  parallel.forward(batch(group().rank(), 0)).sum().backward();
  optimizer.step();
  for (const auto& parameter : model->parameters()) EXPECT_EQ(parameter.device().type(), test_device().type());

  if (!test_device().is_cpu()) {
    EXPECT_THAT(refused(make_mlp(), {.device = at::Device("cpu")}),
                testing::AllOf(testing::HasSubstr("is on cuda:0"), testing::HasSubstr("is cpu")));
  }
  const auto stays = make_mlp();
  stays->to(at::kCPU);
  EXPECT_THAT(refused(stays, {.device = at::Device("meta")}), testing::HasSubstr("device meta"));
  if (!torch::cuda::is_available()) {
    EXPECT_THAT(refused(stays, {.device = at::Device("cuda")}), testing::HasSubstr("device cuda"));
    EXPECT_THAT(refused(stays, {.device = at::Device("cuda:1")}), testing::HasSubstr("device cuda:1"));
  }
  for (const auto& parameter : stays->parameters()) EXPECT_TRUE(parameter.device().is_cpu()) << "nothing is lost";
}

TEST(Fsdp, FSDP10_the_whole_module_cannot_be_ignored) {
  const auto model = make_mlp();
  std::vector<std::string> names;
  for (const auto& entry : model->named_parameters()) names.push_back(entry.key());
  EXPECT_THAT(refused(model, {.ignored_parameters = names}), testing::HasSubstr("requires a gradient"));
  EXPECT_THAT(refused(model, {.ignored_modules = {""}}), testing::HasSubstr("requires a gradient"));
}

TEST(Fsdp, FSDP22_a_module_is_wrapped_once) {
  const auto model = make_mlp();
  FullyShardedDataParallel<MlpImpl> parallel(model, group());
  EXPECT_THAT(refused(model, {}), testing::HasSubstr("already sharded"));
}

TEST(Fsdp, FSDP19_a_parameter_that_changed_its_shape_is_named) {
  const auto model = make_mlp();
  FullyShardedDataParallel<MlpImpl> parallel(model, group());
  FullyShardedOptimizer<torch::optim::SGD> optimizer(parallel, sgd);
  auto weight = model->named_parameters().pairs().front();
  weight.second.set_data(at::ones({weight.second.size(0) + 1, weight.second.size(1)}, at::kDouble));
  try {
    parallel.forward(batch(group().rank(), 0)).sum().backward();
    optimizer.step();
    ADD_FAILURE() << "went unnoticed";
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr(weight.first));
  }
}

TEST(Fsdp, FSDP07_an_operator_that_takes_more_units_than_the_limit_names_them_and_training_goes_on) {
  auto options = by_layer();
  options.unit_limit = 1;
  options.prefetch_units = 0;
  FullyShardedDataParallel<MlpImpl> parallel(make_mlp(), group(), options);
  if (parallel.shared()) GTEST_SKIP() << "nothing is gathered here";
  const auto both = [&] { at::cat({parallel->first->bias, parallel->second->bias}); };
  const auto message = refusal(both);
  for (const auto* part : {"aten::cat", "unit first", "unit second", "bytes", "summon_full_params"}) {
    EXPECT_THAT(message, testing::HasSubstr(part));
  }
  {
    const auto all = parallel.summon_full_params();
    both();
  }
  parallel.forward(batch(group().rank(), 0)).sum().backward();
}

TEST(Fsdp, FSDP07_a_byte_limit_without_room_for_a_unit_names_it_and_leaves_the_model_as_it_is) {
  auto options = by_layer();
  options.byte_limit = 100;
  const auto model = make_mlp();
  const bool paged = !FullyShardedDataParallel<MlpImpl>(make_mlp(), group()).shared();
  const auto message = refused(model, options);
  if (!paged) GTEST_SKIP() << "nothing is gathered here: " << message;
  EXPECT_THAT(message, testing::HasSubstr("byte_limit 100 is too small for unit"));
  EXPECT_THAT(message, testing::HasSubstr("give at least"));
  EXPECT_EQ(model->forward(batch(0, 0)).numel(), make_mlp()->forward(batch(0, 0)).numel());
}

TEST(Fsdp, wrong_options_are_refused) {
  const auto make = [](const Options& options) { FullyShardedDataParallel<MlpImpl>(make_mlp(), group(), options); };
  EXPECT_THROW(make({.unit_limit = 1, .prefetch_units = 1}), UsageError);
  EXPECT_THROW(make({.shard_size = 2}), UsageError);
  EXPECT_THROW(make({.param_dtype = at::kLong}), UsageError);
  EXPECT_THROW(make({.sharding_strategy = ShardingStrategy::hybrid_shard, .shard_size = group().size() + 1}),
               UsageError);
  FullyShardedDataParallel<MlpImpl> parallel(make_mlp(), group());
  FullyShardedOptimizer<torch::optim::SGD> plain(parallel, sgd);
  EXPECT_THROW(FullyShardedOptimizer<torch::optim::LBFGS>(parallel, torch::optim::LBFGSOptions()), UsageError);
  auto integers = seeded(1);
  integers->register_parameter("count", at::ones({2}, at::kLong), /*requires_grad=*/false);
  EXPECT_THROW(FullyShardedDataParallel<MlpImpl>(integers, group()), UsageError);
}

}  // namespace
}  // namespace shoal::test::fsdp_refusal_test
