// Checkpoints of DecentralizedDataParallel: what ranks have told each other, and what the topology and the buckets have
// to do with it.

#include <gmock/gmock.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>

#include "checkpoint/saving/saver.h"
#include "engine/checkpoint/contents.h"
#include "engine/checkpoint/names.h"
#include "shoal/checkpoint.h"
#include "shoal/decentralized.h"
#include "tests/support/models.h"
#include "tests/support/shared_folder.h"
#include "tests/support/world.h"

namespace shoal::test::checkpoint_gossip_test {
namespace {

using torch::optim::SGD;
using torch::optim::SGDOptions;
using Parallel = DecentralizedDataParallel<MlpImpl>;
using Options = DecentralizedDataParallelOptions;

constexpr double small_bucket = 0.001;  // MiB; several buckets
constexpr double large_bucket = 25;     // one

std::unique_ptr<Parallel> make(const Mlp& model, double rate, const Options& options) {
  return std::make_unique<Parallel>(model, optimizer_recipe<SGD>(SGDOptions(rate)), group(), options);
}

void train(Parallel& parallel, int64_t from, int64_t to) {
  for (int64_t step = from; step < to; ++step) {
    mean_loss(parallel.forward(batch(group().rank(), step))).backward();
  }
}

TEST(TrainingCheckpoint, DEC09_BEY05_all_ranks_hear_after_a_load_of_an_overflow_before_the_save) {
  const SharedFolder folder;
  const Options options{.topology = make_topology("ring", group().size()),
                        .scaler = GradScalerOptions{.initial_scale = 1024, .growth_interval = 1000, .hysteresis = 1},
                        .neighbour_timeout_seconds = 60};
  const auto steps = [&](Parallel& parallel, int64_t from, int64_t to) {
    for (int64_t step = from; step < to; ++step) {
      const bool overflows = step == 5 && group().rank() == 0;
      const auto loss = mean_loss(parallel.forward(batch(group().rank(), step)));
      parallel.scale_loss(overflows ? loss * INFINITY : loss).backward();
      group().barrier().wait();
    }
  };
  const auto parallel = make(seeded(1), 0.01, options);
  TrainingState training(*parallel);
  steps(*parallel, 0, 6);
  EXPECT_EQ(parallel->scaler()->value(), group().rank() == 0 ? 512 : 1024);
  save(folder / "run", training, {.step = 6});
  steps(*parallel, 6, 14);
  EXPECT_EQ(parallel->scaler()->value(), 512);
  EXPECT_TRUE(load(folder / "run", training).exact);
  steps(*parallel, 6, 14);
  EXPECT_EQ(parallel->scaler()->value(), 512) << "reset to an older checkpoint";
  const auto resumed = make(seeded(2), 0.01, options);
  TrainingState again(*resumed);
  EXPECT_TRUE(load(folder / "run", again).exact);
  EXPECT_EQ(resumed->scaler()->value(), group().rank() == 0 ? 512 : 1024);
  steps(*resumed, 6, 14);
  EXPECT_EQ(resumed->scaler()->value(), 512) << "in a new training";
}

TEST(TrainingCheckpoint, BEY05_a_schedule_of_libtorch_goes_on_at_another_number_of_ranks) {
  const SharedFolder folder;
  const auto halves = [](torch::optim::Optimizer& optimizer) {
    return std::make_unique<torch::optim::StepLR>(optimizer, 4, 0.5);
  };
  const auto rates_of = [](Parallel& parallel, int64_t from) {
    std::vector<double> rates;
    for (int64_t step = from; step < 16; ++step) {
      train(parallel, step, step + 1);
      rates.push_back(parallel.optimizers().back()->param_groups()[0].options().get_lr());
    }
    return rates;
  };
  const Options options{.schedule = halves, .neighbour_timeout_seconds = 60, .bucket_cap_mb = small_bucket};
  std::vector<double> expected;
  {
    const auto parallel = make(seeded(1), 0.1, options);
    TrainingState training(*parallel);
    train(*parallel, 0, 6);
    save(folder / "run", training, {.step = 6});
    expected = rates_of(*parallel, 6);
    EXPECT_DOUBLE_EQ(expected.front(), 0.05);
    EXPECT_DOUBLE_EQ(expected.back(), 0.1 / 8);
  }
  {
    const auto resumed = make(seeded(2), 0.1, options);
    TrainingState again(*resumed);
    EXPECT_TRUE(load(folder / "run", again).exact);
    EXPECT_EQ(rates_of(*resumed, 6), expected);
  }
  Parallel alone(seeded(3), optimizer_recipe<SGD>(SGDOptions(0.1)), group().subgroup({group().rank()}), options);
  TrainingState again(alone);
  EXPECT_THAT(load(folder / "run", again).differences, testing::IsEmpty());
  EXPECT_EQ(rates_of(alone, 6), expected);
  group().barrier().wait();
}

// Push-sum. Rank 0 sends to all, the others to rank 0 only.
Options hub(double bucket_cap_mb) {
  std::vector<Edge> edges;
  for (int rank = 1; rank < group().size(); ++rank) {
    edges.push_back({0, rank, 0.1});
    edges.push_back({rank, 0, 0.4});
  }
  return {.topology = Topology("hub", group().size(), Stochastic::column, {RoundSpec{.edges = edges}}),
          .neighbour_timeout_seconds = 60,
          .bucket_cap_mb = bucket_cap_mb};
}

// Mean of the ranks' present values.
std::vector<at::Tensor> mean_of(const Mlp& model) {
  auto list = copies(*model);
  for (auto& values : list) group().all_reduce(values, ReduceOp::avg).wait();
  return list;
}

// Ranks that begin with different values and do not learn.
std::unique_ptr<Parallel> apart(const Mlp& model, const Options& options) {
  auto parallel = make(model, 0, options);
  const torch::NoGradGuard no_grad;
  for (auto& parameter : model->parameters()) parameter.add_(group().rank() * group().rank());
  return parallel;
}

TEST(TrainingCheckpoint, BEY04_BEY05_push_sum_goes_on_with_other_buckets_and_ends_under_another_topology) {
  if (group().size() < 3) GTEST_SKIP() << "two ranks have no directed graph that is not doubly stochastic";
  const SharedFolder folder;
  const auto model = seeded(1);
  const auto parallel = apart(model, hub(small_bucket));
  TrainingState training(*parallel);
  const auto start = mean_of(model);
  train(*parallel, 0, 2);
  save(folder / "run", training, {.step = 2});
  const auto saved = mean_of(model);
  EXPECT_GT(difference(saved, start), 1e-3) << "ranks have different weights";
  train(*parallel, 2, 120);
  EXPECT_LT(difference(model->parameters(), start), 1e-6);
  for (const double bucket : {small_bucket, large_bucket}) {
    const auto other = seeded(2);
    const auto resumed = make(other, 0, hub(bucket));
    TrainingState again(*resumed);
    EXPECT_TRUE(load(folder / "run", again).exact);
    train(*resumed, 2, 120);
    EXPECT_LT(difference(other->parameters(), start), 1e-6) << bucket;
  }
  const auto other = seeded(2);
  const auto resumed =
      make(other, 0, {.topology = make_topology("ring", group().size()), .neighbour_timeout_seconds = 60});
  TrainingState again(*resumed);
  load(folder / "run", again);
  train(*resumed, 2, 120);
  EXPECT_LT(difference(other->parameters(), saved), 1e-6);
  EXPECT_LT(resumed->consensus_distance(), 1e-6);
  group().barrier().wait();
}

TEST(TrainingCheckpoint, BEY04_BEY05_weights_of_push_sum_that_do_not_fit_the_buckets_are_named_and_begin_with_1) {
  if (group().size() < 3) GTEST_SKIP() << "two ranks have no directed graph that is not doubly stochastic";
  const SharedFolder folder;
  const auto model = seeded(1);
  const auto parallel = apart(model, hub(small_bucket));
  train(*parallel, 0, 2);
  const auto saved = mean_of(model);
  auto contents = contents_of(*checkpoint_source(*parallel), group(), {}, {.step = 2});
  // On one rank a bucket has missed an exchange.
  if (group().rank() == 1) contents.rank_state[checkpoint_names::carried]["mass"][0] = 0.125;
  CheckpointSaver(group(), folder / "run").save(contents);
  const auto other = seeded(2);
  const auto resumed = make(other, 0, hub(large_bucket));
  TrainingState again(*resumed);
  const auto loaded = load(folder / "run", again);
  EXPECT_FALSE(loaded.exact);
  EXPECT_THAT(loaded.differences, testing::ElementsAre(testing::HasSubstr("push-sum's weights of other buckets")));
  train(*resumed, 2, 120);
  EXPECT_LT(difference(other->parameters(), saved), 1e-6);
  const auto same = make(seeded(3), 0, hub(small_bucket));
  TrainingState third(*same);
  EXPECT_TRUE(load(folder / "run", third).exact);
  group().barrier().wait();
}

}  // namespace
}  // namespace shoal::test::checkpoint_gossip_test
