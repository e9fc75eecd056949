// Hosts that shard a model among their ranks and gossip with each other, when a host dies (rows DEC17, DEC19).

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>
#include <torch/optim/sgd.h>

#include <csignal>

#include "shoal/checkpoint.h"
#include "shoal/error.h"
#include "shoal/shard_gossip.h"
#include "tests/support/forked_ranks.h"
#include "tests/support/models.h"
#include "tests/support/temp_folder.h"

namespace shoal {
namespace {

using namespace test;  // NOLINT(google-build-using-namespace): helpers of this folder's tests

constexpr int hosts_of_two = 3;
constexpr int64_t fateful = 10;  // the step before which ranks die

// Hosts of two ranks.
struct Hosts {
  explicit Hosts(const World& world) : groups(host_groups(world.group(), 2)) {}

  double sum() {
    double sum = 0;
    const auto whole = parallel.summon_full_params(/*writeback=*/false);
    for (const auto& parameter : model->parameters()) sum += parameter.abs().sum().item<double>();
    return sum;
  }

  HostGroups groups;
  Mlp model = seeded(1);
  FullyShardedDataParallel<MlpImpl> parallel{model.ptr(), groups.inside};
  ShardGossipOptimizer<torch::optim::SGD> optimizer{
      parallel,
      torch::optim::SGDOptions(0.1),
      groups.across,
      {.topology = make_topology("ring", groups.across.size()), .neighbour_timeout_seconds = 0.5}};
};

// Trains 40 steps on three hosts, and saves if there is a folder; returns the rank's report.
std::string train(const World& world, const std::vector<int>& victims, const std::string& folder = "") {
  Hosts hosts(world);
  auto& [groups, model, parallel, optimizer] = hosts;
  try {
    for (int64_t step = 0; step < 40; ++step) {
      const bool dies = std::count(victims.begin(), victims.end(), world.rank()) > 0;
      if (dies && step == fateful) std::raise(SIGKILL);
      mean_loss(parallel.forward(batch(world.rank(), step))).backward();
      optimizer.step();
      optimizer.zero_grad();
      usleep(5000);
    }
  } catch (const CommError& error) {
    return fmt::format("CommError: {}", error.what());
  }
  optimizer.global_avg();
  if (!folder.empty()) {
    TrainingState training(parallel, optimizer, world.group());
    save(folder, training, {.step = 40});
  }
  return fmt::format("removed {} of {}, distance {:.0e}, sum {:.15g}", fmt::join(optimizer.statistics().removed, " "),
                     groups.across.size(), optimizer.consensus_distance(), hosts.sum());
}

void expect_others_to_go_on(const std::vector<RankEnded>& ended, int lost) {
  for (int rank = 0; rank < 2 * hosts_of_two; ++rank) {
    if (rank / 2 == lost) continue;
    EXPECT_TRUE(ended[rank].text.starts_with(fmt::format("removed {} of 3, distance 0e+00", lost)))
        << "rank " << rank << ": " << ended[rank].text;
    EXPECT_EQ(ended[rank].text, ended[lost == 0 ? 2 : 0].text) << "one model";
  }
}

TEST(LostHost, DEC17_the_other_hosts_go_on_without_a_host_that_has_died) {
  for (const int lost : {1, 2}) {
    const auto ended = run_ranks(2 * hosts_of_two, [&](const World& world) {
      return train(world, {2 * lost, 2 * lost + 1});
    });
    for (const int rank : {2 * lost, 2 * lost + 1}) EXPECT_TRUE(WIFSIGNALED(ended[rank].status));
    expect_others_to_go_on(ended, lost);
  }
}

TEST(LostHost, DEC17_what_the_other_hosts_save_is_loaded_by_as_many) {
  const TempFolder folder;
  const auto ended = run_ranks(2 * hosts_of_two, [&](const World& world) {
    return train(world, {2, 3}, folder.path());
  });
  expect_others_to_go_on(ended, 1);
  const auto loaded = run_ranks(2 * (hosts_of_two - 1), [&](const World& world) {
    Hosts hosts(world);
    TrainingState training(hosts.parallel, hosts.optimizer, world.group());
    const auto found = load(folder.path(), training);
    mean_loss(hosts.parallel.forward(batch(world.rank(), found.step))).backward();
    const double sum = hosts.sum();
    hosts.optimizer.step();
    return fmt::format("step {}{}, sum {:.15g}", found.step, found.exact ? ", exact" : "", sum);
  });
  const auto sum = ended[0].text.substr(ended[0].text.find("sum"));
  for (const auto& rank : loaded) EXPECT_EQ(rank.text, "step 40, exact, " + sum);
}

TEST(LostHost, DEC19_a_rank_that_dies_ends_its_host_with_an_error_that_names_it_and_no_other_host) {
  for (const int victim : {2, 5}) {
    const auto ended = run_ranks(2 * hosts_of_two, [&](const World& world) { return train(world, {victim}); });
    const int partner = victim ^ 1;
    EXPECT_TRUE(WIFSIGNALED(ended[victim].status));
    EXPECT_TRUE(ended[partner].text.starts_with("CommError")) << ended[partner].text;
    EXPECT_NE(ended[partner].text.find(fmt::format("rank {} (pid", victim)), std::string::npos) << ended[partner].text;
    expect_others_to_go_on(ended, victim / 2);
  }
}

}  // namespace
}  // namespace shoal
