// BEY09: ranks that wrap equal models with different options.

#include <gmock/gmock.h>
#include <torch/optim/sgd.h>

#include "shoal/decentralized.h"
#include "shoal/fsdp.h"
#include "shoal/hooks.h"
#include "shoal/megatron.h"
#include "shoal/optimizer_in_backward.h"
#include "shoal/shard_gossip.h"
#include "shoal/zero.h"
#include "tests/strategy/faults/mismatch.h"
#include "tests/support/models.h"
#include "tests/support/training.h"

namespace shoal::test::mismatch_options_test {
namespace {

using namespace mismatch;  // NOLINT(google-build-using-namespace): helpers of this folder's tests

TEST_F(Mismatch, BEY09_names_different_communication_hooks) {
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy);
    expect_named(
        [&] {
          Training<MlpImpl>::make<torch::optim::SGD>(
              strategy, seeded(3).ptr(), group(), torch::optim::SGDOptions(0.1),
              {.hook = std::make_shared<CompressHook>(odd_one() ? at::kHalf : at::kBFloat16)});
        },
        {"the options of ", "rank 0 has communication_hook bf16", odd_name() + " has communication_hook fp16"});
  }
}

TEST_F(Mismatch, BEY09_names_different_options_of_wrappers) {
  const auto expect_option = [](const std::string& wrapper, const std::string& name, const std::string& usual,
                                const std::string& odd, const std::function<void()>& act) {
    expect_named(act, {"the options of " + wrapper, "rank 0 has " + name + " " + usual,
                       odd_name() + " has " + name + " " + odd});
  };
  const auto hook = std::make_shared<SumHook>();
  using Ddp = DistributedDataParallelOptions;
  const auto ddp = [&](const Ddp& odd, const std::string& name, const std::string& usual, const std::string& other) {
    expect_option("DistributedDataParallel", name, usual, other, [&] {
      const DistributedDataParallel<MlpImpl> parallel(seeded(3), group(), odd_one() ? odd : Ddp());
    });
  };
  ddp({.broadcast_buffers = false}, "broadcast_buffers", "yes", "no");
  ddp({.find_unused_parameters = true}, "find_unused_parameters", "no", "yes");
  ddp({.reduce_dtype = at::kHalf}, "reduce_dtype", "none", "Half");
  ddp({.communication_hook = hook}, "communication_hook", "none", "sum");
  ddp({.bucket_cap_mb = 1e-3}, "bucket_cap_mb", "25", "0.001");
  using Sharded = ShardedDataParallelOptions;
  const auto sgd = torch::optim::SGDOptions(0.1);
  const auto sharded = [&](const Sharded& odd, const std::string& name, const std::string& usual,
                           const std::string& other) {
    expect_option("ShardedDataParallel", name, usual, other, [&] {
      auto model = seeded(3);
      OSS<torch::optim::SGD> optimizer(model->parameters(), sgd, group());
      const ShardedDataParallel<MlpImpl> parallel(model, optimizer, group(), odd_one() ? odd : Sharded());
    });
  };
  sharded({.sync_models_at_startup = false}, "sync_models_at_startup", "yes", "no");
  sharded({.communication_hook = hook}, "communication_hook", "none", "sum");
  sharded({.reduce_buffer_size = 100}, "reduce_buffer_size", "8388608", "100");
  sharded({.reduce_fp16 = true}, "reduce_fp16", "no", "yes");
  expect_option("OSS", "broadcast_fp16", "false", "true", [&] {
    const OSS<torch::optim::SGD> optimizer(seeded(3)->parameters(), sgd, group(), {.broadcast_fp16 = odd_one()});
  });
  expect_option("DistributedOptimizer", "communication_hook", "none", "sum", [&] {
    const DistributedOptimizer<torch::optim::SGD> optimizer(seeded(3), sgd, group(),
                                                            {.communication_hook = odd_one() ? hook : nullptr});
  });
}

TEST_F(Mismatch, BEY09_names_different_topologies) {
  expect_named(
      [] {
        const DecentralizedDataParallel<MlpImpl> parallel(
            seeded(3).ptr(), optimizer_recipe<torch::optim::SGD>(torch::optim::SGDOptions(0.1)), group(),
            {.topology = make_topology(odd_one() ? "complete" : "ring", group().size())});
      },
      {"topology", "rank 0 has ring", odd_name() + " has complete"});
}

// Ranks read each other's memory at places that their buckets define.
TEST_F(Mismatch, BEY09_names_different_options_of_decentralised_ranks) {
  using Options = DecentralizedDataParallelOptions;
  const std::vector<std::pair<Options, std::vector<std::string>>> cases{
      {{.bucket_cap_mb = 1}, {"bucket_cap_mb 25", "bucket_cap_mb 1"}},
      {{.exchange_dtype = at::kBFloat16}, {"exchange_dtype none", "exchange_dtype BFloat16"}},
      {{.compressed_exchange = CompressedExchange{}}, {"compressed_exchange"}},
      {{.scaler = GradScalerOptions{}}, {"no scaler", "scaler with initial_scale"}}};
  for (const auto& [options, parts] : cases) {
    auto named = parts;
    named.insert(named.end(), {"rank 0 has", odd_name() + " has"});
    expect_named(
        [&, odd = options] {
          const DecentralizedDataParallel<MlpImpl> parallel(seeded(3).ptr(), decentralized_sgd(), group(),
                                                            odd_one() ? odd : Options{});
        },
        named);
  }
}

TEST_F(Mismatch, BEY09_names_different_compression_of_decentralised_ranks) {
  expect_named(
      [] {
        const CompressedExchange exchange{.top_k = odd_one() ? std::optional(1.0) : std::nullopt};
        const DecentralizedDataParallel<MlpImpl> parallel(
            seeded(3).ptr(), decentralized_sgd(), group(),
            {.topology = make_topology("ring", group().size()), .compressed_exchange = exchange});
      },
      {"rank 0 has compressed_exchange with top_k none", odd_name() + " has compressed_exchange with top_k 1"});
}

TEST_F(Mismatch, BEY09_names_different_options_of_hosts_that_average) {
  const std::vector<std::pair<ShardGossipOptions, std::vector<std::string>>> cases{
      {{.overlap = false}, {"overlap true", "overlap false"}},
      {{.bucket_cap_mb = 1}, {"bucket_cap_mb 25", "bucket_cap_mb 1"}},
      {{.exchange_dtype = at::kHalf}, {"exchange_dtype none", "exchange_dtype Half"}}};
  const auto hosts = host_groups(group(), 1);
  for (const auto& [options, parts] : cases) {
    expect_named(
        [&, odd = options] {
          FullyShardedDataParallel<MlpImpl> parallel(seeded(3), hosts.inside);
          const ShardGossipOptimizer<torch::optim::SGD> optimizer(parallel, torch::optim::SGDOptions(0.1), hosts.across,
                                                                  odd_one() ? odd : ShardGossipOptions{});
        },
        {"the options of ShardGossipOptimizer", "rank 0 has " + parts[0], odd_name() + " has " + parts[1]});
  }
}

// Each rank would divide the sums, and move its scale, in its own way.
TEST_F(Mismatch, BEY09_names_different_options_of_loss_scalers) {
  using torch::optim::SGD;
  using torch::optim::SGDOptions;
  const GradScalerOptions usual{.initial_scale = 1024};
  for (const auto& other :
       {GradScalerOptions{.initial_scale = 64}, GradScalerOptions{.initial_scale = 1024, .dynamic = false},
        GradScalerOptions{.initial_scale = 1024, .growth_interval = 1}}) {
    const auto scaler = odd_one() ? other : usual;
    const std::vector<std::function<void()>> makers{
        [&] {
          FullyShardedDataParallel<MlpImpl> parallel(seeded(3), group());
          const FullyShardedOptimizer<SGD> optimizer(parallel, SGDOptions(0.1), {.scaler = scaler});
        },
        [&] { const DistributedOptimizer<SGD> optimizer(seeded(3), SGDOptions(0.1), group(), {.scaler = scaler}); },
        [&] {
          auto model = seeded(3);
          DistributedDataParallel<MlpImpl> parallel(model, group());
          SGD optimizer(model->parameters(), SGDOptions(0.1));
          const OptimizerInBackward inside(parallel, optimizer, {.scaler = scaler});
        },
        [&] {
          const DecentralizedDataParallel<MlpImpl> parallel(seeded(3).ptr(), decentralized_sgd(), group(),
                                                            {.scaler = scaler});
        }};
    for (size_t number = 0; number < makers.size(); ++number) {
      SCOPED_TRACE(number);
      expect_named(makers[number], {"rank 0 has scaler with initial_scale 1024, dynamic true",
                                    odd_name() + " has scaler with initial_scale"});
    }
  }
}

}  // namespace
}  // namespace shoal::test::mismatch_options_test
