// FullyShardedDataParallel before the first step: comparison over ranks, ignored tensors, initial values, and groups of
// ranks that share a model.

#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include "comm/group/rank_groups.h"
#include "shoal/error.h"
#include "tests/strategy/all/warnings.h"
#include "tests/strategy/fsdp/fsdp_training.h"
#include "tests/support/refusal.h"

namespace shoal::test::fsdp_setup_test {
namespace {

using testing::HasSubstr;
using Groups = std::vector<std::vector<int>>;

TEST(Fsdp, FSDP01_hybrid_takes_the_ranks_of_each_host_wherever_they_are) {
  const auto by_host = [](const std::vector<int>& hosts, std::optional<int> size = std::nullopt) {
    return rank_groups(hosts, size, "FullyShardedDataParallel", "shard_size");
  };
  EXPECT_EQ(by_host({0, 1, 0, 1}), (Groups{{0, 2}, {1, 3}}));
  EXPECT_EQ(by_host({0, 0, 1, 1}), (Groups{{0, 1}, {2, 3}}));
  EXPECT_EQ(by_host({0, 1, 2}), (Groups{{0}, {1}, {2}}));
  EXPECT_EQ(by_host({0, 1, 0, 1}, 2), (Groups{{0, 1}, {2, 3}})) << "in a row if so told";
  const auto place = hybrid_ranks({{0, 2}, {1, 3}}, 3);
  EXPECT_EQ(place.inside, (std::vector<int>{1, 3}));
  EXPECT_EQ(place.across, (std::vector<int>{2, 3}));
  EXPECT_THAT(refusal([&] { by_host({0, 1, 0, 0}); }), HasSubstr("host 0 has rank 0, 2, 3; host 1 has rank 1"));
  EXPECT_THAT(refusal([&] { by_host({0, 0, 1}, 2); }), HasSubstr("shard_size"));
}

TEST(Fsdp, options_are_compared_over_all_ranks) {
  if (group().size() == 1) GTEST_SKIP() << "no peers";
  const bool last = group().rank() == group().size() - 1;
  const auto model = make_mlp();
  const auto refused = [&](const Options& options) {
    return refusal<DisagreeError>([&] { FullyShardedDataParallel<MlpImpl>(model, group(), options); });
  };
  const auto no_shard = ShardingStrategy::no_shard;
  EXPECT_THAT(refused({.sharding_strategy = no_shard, .unit_limit = last ? 4U : 3U}), HasSubstr("unit_limit"));
  EXPECT_THAT(refused({.sharding_strategy = last ? no_shard : ShardingStrategy::full_shard}), HasSubstr("no_shard"));
  EXPECT_THAT(refused({.sharding_strategy = no_shard, .ignored_parameters = {last ? "third.bias" : "first.bias"}}),
              HasSubstr("third.bias"));
  EXPECT_THAT(refused({.auto_wrap_policy = last ? wrap_names({"first"}) : wrap_names({"second"})}), HasSubstr("unit"));
}

// With one shard group per rank, and with two shard groups.
TEST(Fsdp, optimizers_are_compared_over_all_ranks) {
  if (group().size() == 1) GTEST_SKIP() << "no peers";
  const bool last = group().rank() == group().size() - 1;
  for (const auto strategy : {ShardingStrategy::no_shard, ShardingStrategy::hybrid_shard}) {
    Options options{.sharding_strategy = strategy};
    if (strategy == ShardingStrategy::hybrid_shard) options.shard_size = group().size() % 2 == 0 ? 2 : 1;
    FullyShardedDataParallel<MlpImpl> parallel(make_mlp(), group(), options);
    EXPECT_THAT(refusal<DisagreeError>(
                    [&] { FullyShardedOptimizer<torch::optim::SGD>(parallel, SGDOptions(last ? 0.2 : 0.1)); }),
                HasSubstr("lr"));
    EXPECT_THAT(refusal<DisagreeError>([&] {
                  FullyShardedOptimizer<torch::optim::SGD>(parallel, SGDOptions(0.1), {.clip_grad = last ? 1.0 : 2.0});
                }),
                HasSubstr("clip_grad"));
  }
}

TEST(Fsdp, FSDP10_what_is_sharded_already_cannot_be_ignored) {
  const auto model = make_mlp();
  FullyShardedDataParallel<torch::nn::LinearImpl> inner(model->second.ptr(), group());
  const auto refused = [&](const Options& options) {
    return refusal([&] { FullyShardedDataParallel<MlpImpl>(model, group(), options); });
  };
  EXPECT_THAT(refused({.ignored_modules = {"second"}}), HasSubstr("second.weight is already sharded"));
  EXPECT_THAT(refused({.ignored_parameters = {"second.bias"}}), HasSubstr("second.bias is already sharded"));
  FullyShardedDataParallel<MlpImpl> outer(model, group(), by_layer());
  EXPECT_EQ(outer.units().size(), 2U) << "it is left alone without being told";
}

TEST(Fsdp, FSDP10_what_a_wrapper_of_a_part_ignores_the_outer_one_ignores_as_well) {
  const auto model = make_mlp();
  const auto shape = model->second->weight.sizes().vec();
  FullyShardedDataParallel<torch::nn::LinearImpl> inner(model->second.ptr(), group(),
                                                        {.ignored_parameters = {"weight"}});
  FullyShardedDataParallel<MlpImpl> outer(model, group(), by_layer());
  using Units = std::vector<std::vector<std::string>>;
  EXPECT_EQ(outer.units(), (Units{{"first.weight", "first.bias"}, {"third.weight", "third.bias"}}));
  mean_loss(outer.forward(batch(group().rank(), 0))).backward();
  EXPECT_TRUE(model->second->weight.grad().defined()) << "nobody has taken it";
  // Wrappers beside or around it do not matter: one may shard what another ignores.
  const auto other = make_mlp();
  FullyShardedDataParallel<MlpImpl> around(other, group(), {.ignored_modules = {"second"}});
  FullyShardedDataParallel<torch::nn::LinearImpl> part(other->second.ptr(), group());
  EXPECT_EQ(part.units(), (Units{{"weight", "bias"}}));
}

TEST(Fsdp, FSDP10_ignoring_the_module_itself_warns) {
  Warnings warnings;
  EXPECT_THAT(refusal([&] { FullyShardedDataParallel<MlpImpl>(make_mlp(), group(), {.ignored_modules = {""}}); }),
              HasSubstr("requires a gradient"));
  EXPECT_THAT(warnings.list(), testing::ElementsAre(HasSubstr("ignored_modules names the module itself")));
}

at::Tensor flat(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> parts;
  for (const auto& tensor : tensors)
    parts.push_back(tensor.detach().reshape({-1}).clone());  // no operator takes all units
  return at::cat(parts);
}

std::shared_ptr<MlpImpl> filled(double value) {
  const auto model = make_mlp();
  const torch::NoGradGuard no_grad;
  for (auto& parameter : model->parameters()) parameter.fill_(value);
  return model;
}

TEST(Fsdp, FSDP11_without_sync_module_states_each_rank_s_values_count_for_what_it_owns) {
  for (const bool whole : {false, true}) {
    auto options = by_layer();
    options.sync_module_states = false;
    options.shard_by_parameter = whole;
    FullyShardedDataParallel<MlpImpl> parallel(filled(group().rank() + 1), group(), options);
    const auto own = flat(parallel.own_parameters());
    EXPECT_TRUE(at::equal(own, at::full_like(own, group().rank() + 1)));
    const auto all = flat(parallel->parameters());
    for (int rank = 0; rank < group().size(); ++rank) {
      auto owned = at::full({1}, rank == group().rank() ? own.numel() : 0, at::kLong);
      group().all_reduce(owned).wait();
      EXPECT_EQ((all == rank + 1).sum().item<int64_t>(), owned.item<int64_t>()) << "rank " << rank;
      EXPECT_GT(owned.item<int64_t>(), 0);
    }
  }
}

TEST(Fsdp, FSDP11_ranks_that_own_the_same_must_start_with_the_same) {
  for (const auto strategy : {ShardingStrategy::no_shard, ShardingStrategy::hybrid_shard}) {
    Options options{.sharding_strategy = strategy, .sync_module_states = false};
    if (strategy == ShardingStrategy::hybrid_shard) options.shard_size = 1;
    FullyShardedDataParallel<MlpImpl> equal(filled(1), group(), options);
    if (group().size() == 1) continue;
    const auto model = make_mlp();
    const torch::NoGradGuard no_grad;
    if (group().rank() == 1) model->second->bias[0] += 1;
    EXPECT_THAT(refusal<DisagreeError>([&] { FullyShardedDataParallel<MlpImpl>(model, group(), options); }),
                HasSubstr("second.bias differs"));
  }
}

}  // namespace
}  // namespace shoal::test::fsdp_setup_test
