// DecentralizedDataParallel compared with reference runs of decent-dp's algorithm (tests/golden/decentralized).

#include <fmt/format.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include "data/reference.h"
#include "models/digest.h"
#include "models/loss.h"
#include "models/registry.h"
#include "shoal/decentralized.h"
#include "tests/golden/compare.h"
#include "tests/support/world.h"

namespace shoal::decentralized_parity_test {
namespace {

using nlohmann::json;
using test::group;

OptimizerRecipe optimizer_of(const json& config) {
  if (config.at("optimizer") == "adamw") {
    return optimizer_recipe<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-3).weight_decay(0.1));
  }
  return optimizer_recipe<torch::optim::SGD>(torch::optim::SGDOptions(0.01).momentum(0.9));
}

json digests(const torch::nn::Module& module) {
  auto result = json::object();
  uint64_t index = 0;
  for (const auto& item : module.named_parameters()) {
    if (result.contains(item.key())) continue;
    const auto digest = models::digest(index++, item.value());
    result[item.key()] = {{"shape", item.value().sizes().vec()},
                          {"sum", digest.sum},
                          {"abs_sum", digest.abs_sum},
                          {"l2", digest.l2},
                          {"probe", digest.probe}};
  }
  return result;
}

// This rank's final parameters, and the mean losses.
json train(const json& config, const Topology& topology) {
  const std::string name = config.at("model"), size = config.at("size");
  const auto model = models::make_model(name, size, models::Init::reference, config.at("seed"));
  DecentralizedDataParallel parallel(model, optimizer_of(config), group(),
                                     {.topology = topology, .bucket_cap_mb = 0.05});
  auto losses = json::array();
  for (int64_t step = 0; step < config.at("steps"); ++step) {
    const auto batch = data::reference_batch(
        name, size,
        {.seed = config.at("seed"), .step = static_cast<uint64_t>(step), .rank = static_cast<uint64_t>(group().rank())},
        config.at("batch"));
    const auto loss = models::loss_of(parallel.forward(batch.data), batch.target);
    loss.backward();
    auto mean = loss.detach().to(at::kDouble).view({1}).clone();
    group().all_reduce(mean, ReduceOp::avg).wait();
    losses.push_back(mean.item<double>());
  }
  EXPECT_GT(parallel.buckets().size(), 1);
  return {{"loss", losses}, {"params", digests(*model)}};
}

void expect_as(const json& golden, const std::string& peer, const Topology& topology) {
  const auto& run = golden.at("peers").at(peer);
  const json mine{{"loss", run.at("loss")}, {"params", run.at("params_per_rank").at(group().rank())}};
  const json reference{{"config", golden.at("config")}, {"shapes", golden.at("shapes")}, {"peers", {{peer, mine}}}};
  for (const auto& line : golden::compare(train(golden.at("config"), topology), reference, peer)) {
    ADD_FAILURE() << topology.name() << ", rank " << group().rank() << ": " << line;
  }
}

void for_all_runs(const std::function<void(const json& golden, const Topology& topology)>& act) {
  for (const std::string topology : {"complete", "ring", "one-peer-exp", "alternating-exp-ring"}) {
    for (const std::string model : {"mlp_sgd_momentum", "gpt_adamw"}) {
      const auto golden = golden::load(fmt::format("{}/decentralized/{}_{}_w4.json", GOLDEN, topology, model));
      act(golden, make_topology(topology, group().size(), golden.at("config").at("local_world")));
    }
  }
}

TEST(DecentralizedParity, DEC01_DEC06_the_origins_topologies_equal_the_golden_runs_on_every_rank) {
  for_all_runs([](const json& golden, const Topology& topology) { expect_as(golden, "consecutive", topology); });
}

// With a topology that repeats what the origin does with its rounds, the numbers are the origin's: round 1 in the
// second step, and then rounds 3, 4, 5, .. (docs/deviations.md).
TEST(DecentralizedParity, DEC01_the_origins_first_rounds_give_the_origins_numbers) {
  for_all_runs([](const json& golden, const Topology& topology) {
    std::vector<RoundSpec> rounds;
    for (int64_t step = 1; step <= golden.at("config").at("steps"); ++step) {
      const auto& round = topology.round(step <= 2 ? step - 1 : step);
      auto& spec = rounds.emplace_back();
      for (int rank = 0; rank < group().size(); ++rank) {
        for (const auto& [source, weight] : round.sources(rank)) spec.edges.push_back({source, rank, weight});
      }
    }
    const Topology origins(topology.name() + " as the origin has it", group().size(), Stochastic::doubly, rounds);
    expect_as(golden, "origin", origins);
    expect_as(golden, "decent_dp", origins);
  });
}

}  // namespace
}  // namespace shoal::decentralized_parity_test
