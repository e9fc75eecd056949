// What an elastic loop does not support, refused by name.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>

#include "shoal/fsdp.h"
#include "shoal/join.h"
#include "shoal/optimizer_in_backward.h"
#include "shoal/sync_batch_norm.h"
#include "shoal/zero.h"
#include "tests/elastic/elastic_run.h"
#include "tests/support/refusal.h"

namespace shoal::elastic_refused_test {
namespace {

TEST(ElasticLoop, ELA01_a_limit_that_is_too_long_is_refused_with_the_longest) {
  try {
    ElasticOptions{.silent_host_seconds = 1e7}.validate(2);
    ADD_FAILURE() << "no error";
  } catch (const UsageError& error) {
    EXPECT_STREQ(error.what(), "ElasticOptions: silent_host_seconds is 10000000: give 0.5 or more, below 1e6");
  }
}

TEST(ElasticLoop, ELA01_what_is_not_supported_is_refused_by_name) {
  const auto ended = test::run_ranks(2, [&](const World& world) -> std::string {
    std::string faults;
    const auto expect_refusal = [&](const std::string& expected, const auto& make) {
      const auto text = test::refusal(make);
      if (text.find(expected) == std::string::npos) faults += fmt::format("'{}' in place of '{}'\n", text, expected);
    };
    const auto net = [] { return std::make_shared<test::Net>(); };
    using Adam = torch::optim::Adam;
    const torch::optim::AdamOptions rate(0.01);
    expect_refusal("FullyShardedDataParallel with torch::optim::Adam is not supported", [&] {
      auto model = net();
      FullyShardedDataParallel parallel(model, world.group());
      Adam optimizer(model->parameters(), rate);
      Elastic elastic(world, parallel, optimizer);
    });
    expect_refusal("sharding_strategy no_shard is not supported", [&] {
      auto model = net();
      FullyShardedDataParallel parallel(model, world.group(), {.sharding_strategy = ShardingStrategy::no_shard});
      FullyShardedOptimizer<Adam> optimizer(parallel, rate);
      Elastic elastic(world, parallel, optimizer);
    });
    expect_refusal("the optimizer is not the one of this FullyShardedDataParallel", [&] {
      auto model = net(), other = net();
      FullyShardedDataParallel parallel(model, world.group()), another(other, world.group());
      FullyShardedOptimizer<Adam> optimizer(another, rate);
      Elastic elastic(world, parallel, optimizer);
    });
    expect_refusal("the optimizer is not the one of this ShardedDataParallel", [&] {
      auto model = net();
      OSS<Adam> optimizer(model->parameters(), rate, world.group());
      ShardedDataParallel parallel(model, optimizer, world.group(), {.log_sizes = false});
      Adam other(model->parameters(), rate);
      Elastic elastic(world, parallel, other);
    });
    expect_refusal("with several optimizers", [&] {
      auto model = net();
      OSS<Adam> first(model->first->parameters(), rate, world.group());
      OSS<Adam> rest(
          std::vector<torch::optim::OptimizerParamGroup>{torch::optim::OptimizerParamGroup(model->second->parameters()),
                                                         torch::optim::OptimizerParamGroup(model->third->parameters())},
          rate, world.group());
      ShardedDataParallel parallel(model, {&first, &rest}, world.group(), {.log_sizes = false});
      Elastic elastic(world, parallel, first);
    });
    expect_refusal("broadcast_fp16 is not supported", [&] {
      auto model = net();
      OSS<Adam> optimizer(model->parameters(), rate, world.group(), {.broadcast_fp16 = true});
      DistributedDataParallel parallel(model, world.group());
      Elastic elastic(world, parallel, optimizer);
    });
    expect_refusal("reuse_grad_buf_for_param_gather leaves parameters", [&] {
      auto model = net();
      DistributedOptimizer<Adam> optimizer(model, rate, world.group(), {.reuse_grad_buf_for_param_gather = true});
      Elastic elastic(world, optimizer);
    });
    expect_refusal("of several chunks is not supported", [&] {
      const DistributedOptimizerCore::Modules chunks{net(), net()};
      DistributedOptimizer<Adam> optimizer(chunks, rate, world.group());
      Elastic elastic(world, optimizer);
    });
    expect_refusal("all_reduce_grads() keeps groups of its own", [&] {
      auto model = net();
      DistributedOptimizer<Adam> optimizer(model, rate, world.group(), {.overlap_grad_reduce = false});
      optimizer.all_reduce_grads({model->third->bias}, world.group());
      Elastic elastic(world, optimizer);
    });
    expect_refusal("which do not follow when", [&] {
      auto model = net();
      DistributedOptimizer<Adam> optimizer(model, rate, world.group(), {.overlap_grad_reduce = false});
      Elastic elastic(world, optimizer);
      optimizer.all_reduce_grads({model->third->bias}, world.group());
    });
    expect_refusal("sub-modules with a wrapper of their own are not supported", [&] {
      auto model = net();
      FullyShardedDataParallel<torch::nn::LinearImpl> inner(model->second.ptr(), world.group());
      FullyShardedDataParallel parallel(model, world.group());
      FullyShardedOptimizer<Adam> optimizer(parallel, rate);
      Elastic elastic(world, parallel, optimizer);
    });
    expect_refusal("model_parallel_group has ranks", [&] {
      auto model = net();
      DistributedOptimizer<Adam> optimizer(model, rate, world.group(), {.model_parallel_group = world.group()});
      Elastic elastic(world, optimizer);
    });
    expect_refusal("or DistributedOptimizer without a wrapper", [&] {
      auto model = net(), other = net();
      DistributedOptimizer<Adam> optimizer(model, rate, world.group());
      DistributedDataParallel parallel(other, world.group());
      Elastic elastic(world, parallel, optimizer);
    });
    expect_refusal("OptimizerInBackward", [&] {
      auto model = net();
      DistributedDataParallel parallel(model, world.group());
      Adam optimizer(model->parameters(), rate);
      OptimizerInBackward in_backward(parallel, optimizer);
      Elastic elastic(world, parallel, optimizer);
    });
    expect_refusal("1 is a SyncBatchNorm", [&] {
      torch::nn::Sequential model(torch::nn::Linear(4, 4),
                                  SyncBatchNorm(torch::nn::BatchNormOptions(4), world.group()));
      DistributedDataParallel parallel(model, world.group());
      Adam optimizer(model->parameters(), rate);
      Elastic elastic(world, parallel, optimizer);
    });
    expect_refusal("min_ranks is 3: give 1 to 2", [&] {
      auto model = net();
      DistributedDataParallel parallel(model, world.group());
      Adam optimizer(model->parameters(), rate);
      Elastic elastic(world, parallel, optimizer, {.min_ranks = 3});
    });
    expect_refusal("the sampler is rank 0 of 3's", [&] {
      auto model = net();
      DistributedDataParallel parallel(model, world.group());
      Adam optimizer(model->parameters(), rate);
      DistributedSampler sampler(60, 3, 0);
      Elastic elastic(world, parallel, optimizer, sampler);
    });
    return faults;
  });
  for (const auto& rank : ended) EXPECT_EQ(rank.text, "");
}

// The world has had an Elastic then, so that each case needs another one.
TEST(ElasticLoop, ELA01_a_join_around_steps_is_refused) {
  const torch::optim::AdamOptions rate(0.01);
  const auto step_in = [](Elastic& elastic, Joinable& joinable, bool has_batch) {
    Join join({joinable});
    join.next(has_batch);
    return test::refusal([&] {
      elastic.step(
          1, [] {}, [] {});
    });
  };
  auto ended = test::run_ranks(2, [&](const World& world) {
    auto model = std::make_shared<test::Net>();
    DistributedDataParallel parallel(model, world.group());
    torch::optim::Adam optimizer(model->parameters(), rate);
    Elastic elastic(world, parallel, optimizer);
    return step_in(elastic, parallel, true);
  });
  const auto others = test::run_ranks(2, [&](const World& world) {
    auto model = std::make_shared<test::Net>();
    DistributedOptimizer<torch::optim::Adam> optimizer(model, rate, world.group());
    Elastic elastic(world, optimizer);
    return step_in(elastic, optimizer, world.rank() == 0);
  });
  ended.insert(ended.end(), others.begin(), others.end());
  for (const auto& rank : ended) EXPECT_THAT(rank.text, testing::HasSubstr("leave the Join out"));
}

}  // namespace
}  // namespace shoal::elastic_refused_test
