// Decentralised ranks with different numbers of batches (row BEY03): rank r has 5 + r.

#include <torch/types.h>

#include <chrono>
#include <limits>
#include <thread>

#include "shoal/error.h"
#include "tests/strategy/decentralized/decentralized_ring.h"

namespace shoal::decentralized_uneven_test {
namespace {

using namespace test;  // NOLINT(google-build-using-namespace): helpers of this folder's tests

int64_t batches_of(int rank) {
  return 5 + rank;
}

TEST(Decentralized, BEY03_a_rank_without_batches_passes_until_all_have_made_as_many_steps) {
  for (const auto& name : {"complete", "ring", "one-peer-exp"}) {
    const auto topology = make_topology(name, group().size());
    Simulation<MlpImpl> simulation(
        topology, [] { return seeded(1).ptr(); }, momentum_sgd);
    auto model = seeded(1);
    DecentralizedDataParallel parallel(model, plain(), group(),
                                       {.topology = topology, .neighbour_timeout_seconds = 20});
    const auto most = batches_of(group().size() - 1);
    for (int64_t step = 0; step < most; ++step) {
      if (step < batches_of(me())) {
        mean_loss(parallel.forward(batch(me(), step))).backward();
      } else {
        parallel.step_without_update();
      }
      simulation.step(
          [&](MlpImpl& of, int rank) { return step < batches_of(rank) ? loss_of(step)(of, rank) : at::Tensor(); });
      ASSERT_LT(difference(model->parameters(), simulation.model(me()).parameters()), 1e-11) << name << " " << step;
    }
    EXPECT_EQ(parallel.steps(), most);
    EXPECT_EQ(parallel.statistics().skipped + parallel.statistics().older, 0);
    parallel.global_avg();  // all ranks are there
    simulation.average();
    expect_equal(model, simulation);
  }
}

TEST(Decentralized, DEC17_a_timeout_that_stands_for_ever_waits) {
  for (const double forever : {1e10, std::numeric_limits<double>::max(), std::numeric_limits<double>::infinity()}) {
    SCOPED_TRACE(forever);
    auto simulation = simulated();
    auto model = seeded(1);
    DecentralizedDataParallel parallel(
        model, plain(), group(), {.topology = ring(), .neighbour_timeout_seconds = forever, .bucket_cap_mb = forever});
    for (int64_t step = 0; step < 3; ++step) {
      if (me() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));
      mean_loss(parallel.forward(batch(me(), step))).backward();
      simulation.step(loss_of(step));
    }
    expect_equal(model, simulation);
    EXPECT_EQ(parallel.statistics().skipped + parallel.statistics().older, 0);
    EXPECT_EQ(parallel.buckets().size(), 1U);
  }
}

TEST(Decentralized, BEY03_pass_drops_gradients_and_weights_of_micro_batches_before) {
  const bool passes = me() == 0;
  for (const bool weighted : {false, true}) {
    auto simulation = simulated();
    auto model = seeded(1);
    DecentralizedDataParallel parallel(model, plain(), group(), {.topology = ring(), .neighbour_timeout_seconds = 20});
    const auto backward = [&](int64_t step) {
      const auto loss = mean_loss(parallel.forward(batch(me(), step)));
      if (weighted) {
        parallel.backward(loss, 1);
      } else {
        loss.backward();
      }
    };
    // With weights that differ between ranks, the first step's mean is the exact one.
    for (int64_t step = 0; step < (weighted ? 1 : 4); ++step) {
      if (passes) {
        const auto scope = parallel.no_sync();
        backward(step);
      }
      if (passes) {
        parallel.step_without_update();
      } else {
        backward(step);
      }
      const double divisor = weighted ? static_cast<double>(group().size() - 1) / group().size() : 1;
      simulation.step(
          [&](MlpImpl& of, int rank) { return rank > 0 ? loss_of(step)(of, rank) / divisor : at::Tensor(); });
      expect_equal(model, simulation);
    }
    for (const auto& parameter : model->parameters()) EXPECT_FALSE(passes && parameter.grad().defined());
    group().barrier().wait();
  }
}

// All ranks of a complete graph, each of which leaves after its last batch: its last shown values are used once more.
TEST(Decentralized, BEY03_a_rank_without_batches_leaves_and_the_mean_is_over_the_others) {
  const int ranks = group().size();
  std::vector<Mlp> models;
  std::vector<std::unique_ptr<torch::optim::SGD>> optimizers;
  for (int rank = 0; rank < ranks; ++rank) {
    models.push_back(seeded(1));
    optimizers.push_back(std::make_unique<torch::optim::SGD>(models[rank]->parameters(), momentum_sgd));
  }
  const auto simulate = [&](int64_t step) {
    for (int rank = 0; rank < ranks; ++rank) {
      if (step < batches_of(rank)) loss_of(step)(*models[rank], rank).backward();
    }
    const torch::NoGradGuard no_grad;
    std::vector<at::Tensor> means;
    for (size_t p = 0; p < models[0]->parameters().size(); ++p) {
      std::vector<at::Tensor> shown;
      for (int rank = 0; rank < ranks; ++rank) {
        if (batches_of(rank) >= step) shown.push_back(models[rank]->parameters()[p]);
      }
      means.push_back(at::stack(shown).mean(0));
    }
    for (int rank = 0; rank < ranks; ++rank) {
      if (step >= batches_of(rank)) continue;
      for (size_t p = 0; p < means.size(); ++p) models[rank]->parameters()[p].copy_(means[p]);
      optimizers[rank]->step();
      optimizers[rank]->zero_grad();
    }
  };
  auto model = seeded(1);
  DecentralizedDataParallel parallel(
      model, plain(), group(),
      {.topology = make_topology("complete", ranks), .neighbour_timeout_seconds = 20, .bucket_cap_mb = small_bucket});
  for (int64_t step = 0; step < batches_of(ranks - 1); ++step) {
    if (step < batches_of(me())) mean_loss(parallel.forward(batch(me(), step))).backward();
    if (step == batches_of(me()) - 1) parallel.leave();
    if (step >= batches_of(me())) continue;
    simulate(step);
    EXPECT_LT(difference(model->parameters(), models[me()]->parameters()), 1e-11) << step;
  }
  EXPECT_EQ(parallel.statistics().skipped + parallel.statistics().older, 0);
  EXPECT_THROW(parallel.step_without_update(), UsageError);
  group().barrier().wait();
}

}  // namespace
}  // namespace shoal::decentralized_uneven_test
