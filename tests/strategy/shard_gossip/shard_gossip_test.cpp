// ShardGossipOptimizer (rows DEC19, BEY14): FSDP on every host, gossip of shards between hosts. The world's ranks are
// split into hosts of one and of two ranks.

#include "shoal/shard_gossip.h"

#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <cstdlib>
#include <limits>
#include <stdexcept>
#include <vector>

#include "shoal/error.h"
#include "tests/strategy/decentralized/decentralized_simulation.h"
#include "tests/strategy/fsdp/fsdp_training.h"

namespace shoal::shard_gossip_test {
namespace {

using namespace test;  // NOLINT(google-build-using-namespace): helpers of this folder's tests
using Sharded = FullyShardedDataParallel<MlpImpl>;
using Gossip = ShardGossipOptimizer<torch::optim::SGD>;

constexpr double small_bucket = 0.001;  // MiB; several buckets

std::vector<int> host_sizes() {
  std::vector<int> sizes{1};
  if (group().size() % 2 == 0) sizes.push_back(2);
  return sizes;
}

// Mean loss of a host's ranks, for one process that simulates hosts.
auto loss_of_host(int size, int64_t step) {
  return [size, step](MlpImpl& model, int host) {
    at::Tensor sum;
    for (int rank = host * size; rank < (host + 1) * size; ++rank) {
      const auto loss = mean_loss(model.forward(batch(rank, step))) / size;
      sum = sum.defined() ? sum + loss : loss;
    }
    return sum;
  };
}

template <class Optimizer>
void train(Sharded& parallel, Optimizer& optimizer, int64_t step) {
  mean_loss(parallel.forward(batch(group().rank(), step))).backward();
  optimizer.step();
  optimizer.zero_grad();
}

// tests/support/hosts.py gives every host its own network and processes; otherwise all ranks are on one host.
TEST(ShardGossip, DEC19_ranks_are_divided_by_the_hosts_that_they_are_on) {
  const bool several = std::getenv("SHOAL_LINK") != nullptr;
  const auto hosts = host_groups(group());
  EXPECT_EQ(hosts.inside.size(), several ? 2 : group().size());
  EXPECT_EQ(hosts.across.size(), several ? group().size() / 2 : 1);
  if (!several) return;
  EXPECT_EQ(hosts.inside.transport(), "host");
  EXPECT_NE(hosts.across.transport(), "host");
}

TEST(ShardGossip, DEC19_equals_a_dense_simulation_of_the_hosts) {
  for (const int size : host_sizes()) {
    const auto hosts = host_groups(group(), size);
    for (const auto* name : {"complete", "ring", "one-peer-exp", "exp"}) {
      const auto topology = make_topology(name, hosts.across.size());
      Simulation<MlpImpl> simulation(topology, make_mlp, sgd);
      const auto model = make_mlp();
      Sharded parallel(model, hosts.inside, by_layer());
      Gossip optimizer(parallel, sgd, hosts.across, {.topology = topology, .bucket_cap_mb = small_bucket});
      const int host = group().rank() / size;
      for (int64_t step = 0; step < 12; ++step) {
        train(parallel, optimizer, step);
        simulation.step(loss_of_host(size, step));
        ASSERT_LT(difference(model->parameters(), simulation.model(host).parameters()), 1e-11)
            << name << ", hosts of " << size << ", step " << step;
      }
      EXPECT_NEAR(optimizer.consensus_distance(), simulation.consensus_distance(), 1e-11);
      EXPECT_EQ(optimizer.statistics().skipped + optimizer.statistics().older + optimizer.statistics().newer, 0);
      EXPECT_EQ(optimizer.statistics().exchanged > 0, hosts.across.size() > 1);
      optimizer.global_avg();
      simulation.average();
      EXPECT_LT(difference(model->parameters(), simulation.model(host).parameters()), 1e-11);
      EXPECT_LT(optimizer.consensus_distance(), 1e-14);
      train(parallel, optimizer, 20);
      simulation.step(loss_of_host(size, 20));
      EXPECT_LT(difference(model->parameters(), simulation.model(host).parameters()), 1e-11) << "after the average";
    }
  }
}

TEST(ShardGossip, BEY14_a_complete_graph_mixed_at_once_is_hybrid_sharding) {
  for (const int size : host_sizes()) {
    const auto hosts = host_groups(group(), size);
    const auto model = make_mlp();
    Sharded parallel(model, hosts.inside, by_layer());
    Gossip optimizer(parallel, sgd, hosts.across,
                     {.topology = make_topology("complete", hosts.across.size()), .overlap = false});
    const auto reference = make_mlp();
    auto options = by_layer();
    options.sharding_strategy = ShardingStrategy::hybrid_shard;
    options.shard_size = size;
    Sharded hybrid(reference, group(), options);
    FullyShardedOptimizer<torch::optim::SGD> hybrid_optimizer(hybrid, sgd);
    for (int64_t step = 0; step < 12; ++step) {
      train(parallel, optimizer, step);
      train(hybrid, hybrid_optimizer, step);
      ASSERT_LT(difference(model->parameters(), reference->parameters()), 1e-12) << step;
    }
  }
}

TEST(ShardGossip, BEY14_a_rank_holds_its_share_of_the_hosts_model_and_state) {
  int64_t whole = 0;
  for (const auto& parameter : make_mlp()->parameters()) whole += parameter.numel();
  for (const int size : host_sizes()) {
    const auto hosts = host_groups(group(), size);
    Sharded parallel(make_mlp(), hosts.inside, by_layer());
    ShardGossipOptimizer<torch::optim::Adam> optimizer(parallel, torch::optim::AdamOptions(1e-3), hosts.across);
    train(parallel, optimizer, 0);
    int64_t own = 0;
    for (const auto& piece : parallel.own_parameters()) own += piece.numel();
    EXPECT_LE(own, whole / size + 3 * 16) << "parts of three units, padded to 128 bytes";
    int64_t state = 0;
    for (const auto& group : optimizer.local_optimizer().param_groups()) {
      for (const auto& piece : group.params()) state += piece.numel();
    }
    EXPECT_EQ(state, own);
    auto sum = at::full({1}, own, at::kLong);
    hosts.inside.all_reduce(sum).wait();
    EXPECT_EQ(sum.item<int64_t>(), whole);
  }
}

TEST(ShardGossip, DEC19_a_host_without_an_update_mixes_all_the_same) {
  const int size = host_sizes().back();
  const auto hosts = host_groups(group(), size);
  const auto topology = make_topology("complete", hosts.across.size());
  Simulation<MlpImpl> simulation(topology, make_mlp, sgd);
  const auto model = make_mlp();
  Sharded parallel(model, hosts.inside, by_layer());
  constexpr auto forever = std::numeric_limits<double>::infinity();
  Gossip optimizer(parallel, sgd, hosts.across, {.topology = topology, .neighbour_timeout_seconds = forever});
  const int host = group().rank() / size;
  for (int64_t step = 0; step < 6; ++step) {
    const auto idles = [&](int of) { return step == 3 && of == 0; };
    if (idles(host)) {
      optimizer.step_without_update();
    } else {
      train(parallel, optimizer, step);
    }
    simulation.step(
        [&](MlpImpl& of, int number) { return idles(number) ? at::Tensor() : loss_of_host(size, step)(of, number); });
    ASSERT_LT(difference(model->parameters(), simulation.model(host).parameters()), 1e-11) << step;
  }
  EXPECT_EQ(optimizer.statistics().skipped + optimizer.statistics().older, 0);
}

TEST(ShardGossip, DEC19_hosts_start_from_the_first_ones_values) {
  const int size = host_sizes().back();
  const auto hosts = host_groups(group(), size);
  const auto model = seeded(1 + group().rank() / size).ptr();
  Sharded parallel(model, hosts.inside);
  const Gossip optimizer(parallel, sgd, hosts.across);
  EXPECT_EQ(difference(model->parameters(), make_mlp()->parameters()), 0);
}

TEST(ShardGossip, DEC19_an_exception_in_the_scope_of_the_mean_leaves_own_values) {
  const auto hosts = host_groups(group(), host_sizes().back());
  const auto model = make_mlp();
  Sharded parallel(model, hosts.inside);
  Gossip optimizer(parallel, sgd, hosts.across);
  for (int64_t step = 0; step < 2; ++step) train(parallel, optimizer, step);
  std::vector<at::Tensor> own;
  for (const auto& parameter : model->parameters()) own.push_back(parameter.detach().clone());
  try {
    const auto mean = optimizer.mean_parameters();
    EXPECT_EQ(difference(model->parameters(), own) > 0, hosts.across.size() > 1);
    throw std::runtime_error("in the evaluation");
  } catch (const std::runtime_error&) {  // NOLINT(bugprone-empty-catch): the program goes on
  }
  EXPECT_EQ(difference(model->parameters(), own), 0);
  train(parallel, optimizer, 2);
}

TEST(ShardGossip, bad_input_is_one_error_on_every_rank) {
  const auto hosts = host_groups(group(), 1);
  const auto refused = [&](const ShardGossipOptions& options, const std::string& text) {
    Sharded parallel(make_mlp(), hosts.inside);
    try {
      const Gossip optimizer(parallel, sgd, hosts.across, options);
      ADD_FAILURE() << "accepted: " << text;
    } catch (const UsageError& error) {
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    }
  };
  refused({.topology = make_topology("ring", group().size() + 1)}, "make_topology(name, across.size())");
  refused({.neighbour_timeout_seconds = -1, .bucket_cap_mb = 0}, "bucket_cap_mb is 0");
  refused({.exchange_dtype = at::kInt}, "exchange_dtype Int");
  EXPECT_THROW(host_groups(group(), group().size() + 1), UsageError);
}

}  // namespace
}  // namespace shoal::shard_gossip_test
