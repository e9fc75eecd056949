// Options and calls that strategies with all shards on each host refuse.

#include <gmock/gmock.h>

#include "shoal/hooks.h"
#include "shoal/megatron.h"
#include "shoal/zero.h"
#include "tests/strategy/by_host.h"
#include "tests/support/models.h"
#include "tests/support/refusal.h"

namespace shoal::by_host_refusals_test {
namespace {

using namespace by_host;  // NOLINT(google-build-using-namespace): helpers of this folder's tests
using ::testing::HasSubstr;

TEST_F(ByHost, SDP01_refusals_of_options) {
  run(
      {1, 2},
      [](const World& world) {
        auto model = model_of(0);
        Adam optimizer(model->parameters(), adam, world.group().by_host(), {.broadcast_fp16 = world.rank() == 0});
        return test::refusal<DisagreeError>([&] { const Parallel parallel(model.ptr(), optimizer, world.group()); });
      },
      HasSubstr("broadcast_fp16"));
  run(
      {2, 2},
      [](const World& world) {
        auto model = model_of(0);
        const torch::optim::AdamOptions own(world.rank() < 2 ? 1e-2 : 1e-3);
        Adam optimizer(model->parameters(), own, world.group().by_host());
        return test::refusal<DisagreeError>([&] { const Parallel parallel(model.ptr(), optimizer, world.group()); });
      },
      HasSubstr("the parameters and options of OSS on each host"));
  run(
      {1, 2},
      [](const World& world) {
        auto model = model_of(0);
        Adam optimizer(model->parameters(), adam, world.group().by_host(), {.broadcast_fp16 = true});
        return test::refusal([&] { const Parallel parallel(model.ptr(), optimizer, world.group()); });
      },
      HasSubstr("broadcast_fp16"));
  run(
      {1, 2},
      [](const World& world) {
        auto model = model_of(0);
        Adam optimizer(model->parameters(), adam, world.group().by_host());
        ShardedDataParallelOptions options;
        options.reduce_fp16 = true;
        return test::refusal([&] { const Parallel parallel(model.ptr(), optimizer, world.group(), options); });
      },
      HasSubstr("needs equally many ranks on each host"));
}

TEST_F(ByHost, SDP01_refusals) {
  run(
      {2, 2},
      [](const World& world) {
        auto model = model_of(0);
        const auto pair = world.group().subgroup(world.rank() < 2 ? std::vector{1, 0} : std::vector{3, 2});
        Adam optimizer(model->parameters(), adam, pair);
        return test::refusal([&] { const Parallel parallel(model.ptr(), optimizer, world.group()); });
      },
      HasSubstr("OSS the wrapper's group by_host()"));
  run(
      {2, 2},
      [](const World& world) {
        auto model = model_of(0);
        Adam optimizer(model->parameters(), adam, world.group().by_host());
        ShardedDataParallelOptions options;
        options.sync_models_at_startup = false;
        return test::refusal([&] { const Parallel parallel(model.ptr(), optimizer, world.group(), options); });
      },
      HasSubstr("sync_models_at_startup"));
  run(
      {2, 2},
      [](const World& world) {
        auto model = model_of(0);
        const auto parameters = model->parameters();
        Adam weights({parameters[0], parameters[2], parameters[4]}, adam, world.group().by_host());
        Adam biases({parameters[1], parameters[3], parameters[5]}, adam, world.group());
        const std::vector<OSSCore*> both{&weights, &biases};
        return test::refusal([&] { const Parallel parallel(model.ptr(), both, world.group()); });
      },
      HasSubstr("give both the same"));
}

TEST_F(ByHost, MEG01_refusals) {
  const auto refused = [](const World& world, const DistributedOptimizerOptions& options) {
    return test::refusal([&] {
      auto model = model_of(0);
      const DistributedOptimizer<torch::optim::Adam> optimizer(model, adam, world.group(), options);
    });
  };
  run(
      {1, 2},
      [&](const World& world) {
        return refused(world, {.reuse_grad_buf_for_param_gather = true, .shard_within_host = true});
      },
      HasSubstr("reuse_grad_buf_for_param_gather with shard_within_host needs equally many ranks"));
  run(
      {1, 2},
      [&](const World& world) {
        return refused(world,
                       {.shard_within_host = true, .communication_hook = std::make_shared<CompressHook>(at::kHalf)});
      },
      HasSubstr("a communication_hook with shard_within_host"));
  run(
      {2, 2},
      [&](const World& world) {
        return refused(world, {.shard_within_host = true, .model_parallel_group = world.group()});
      },
      HasSubstr("model_parallel_group has 4 of the 4 data-parallel ranks; with shard_within_host"));
  run(
      {2, 2},
      [](const World& world) {
        return test::refusal<DisagreeError>([&] {
          auto model = model_of(0);
          const DistributedOptimizer<torch::optim::Adam> optimizer(model, adam, world.group(),
                                                                   {.shard_within_host = world.rank() == 3});
        });
      },
      HasSubstr("shard_within_host"));
}

}  // namespace
}  // namespace shoal::by_host_refusals_test
