// BEY10: an exception anywhere, on one rank or all, leaves any strategy able to continue. Chunks and pipeline stages
// are in megatron_chunks_test.cpp and megatron_stages_test.cpp, several wrappers in two_wrappers_test.cpp; gossip,
// which has no collectives in a step, is in decentralized_rules_test.cpp, gossip_faults_test.cpp and
// shard_gossip_test.cpp.

#include <fmt/format.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <numeric>

#include "shoal/error.h"
#include "tests/strategy/faults/faulty_training.h"
#include "tests/support/world.h"

namespace shoal::faults_test {
namespace {

using test::batch;
using test::difference;
using test::group;
using namespace faults;  // NOLINT(google-build-using-namespace): helpers of this folder's tests

void break_and_train_on(const std::string& strategy, Point point, const std::vector<int>& faulty, bool explicitly,
                        bool from_the_start) {
  SCOPED_TRACE(fmt::format("{}, point {}, rank {} first, said {}, start {}", strategy, static_cast<int>(point),
                           faulty[0], explicitly, from_the_start));
  Trainer trainer(strategy);
  std::vector<int64_t> good;
  if (!from_the_start) {
    for (const int64_t step : {0, 1, 2}) {
      trainer.step(step);
      good.push_back(step);
    }
  }
  const bool here = std::count(faulty.begin(), faulty.end(), group().rank()) > 0;
  if (here && point == Point::collective) trainer.transport->fail = true;
  if (here && point != Point::collective) trainer.model->fail = point;
  try {
    trainer.step(10);
    ADD_FAILURE() << "the step succeeded";
  } catch (const StepAbandoned& error) {
    EXPECT_FALSE(here) << error.what();
    EXPECT_NE(std::string(error.what()).find(fmt::format("rank {}", faulty[0])), std::string::npos) << error.what();
  } catch (const std::exception& error) {
    EXPECT_TRUE(here) << error.what();
    EXPECT_NE(std::string(error.what()).find("injected"), std::string::npos) << error.what();
  }
  trainer.model->fail.reset();
  // DistributedOptimizer sees no forward, so that the failing rank must call abandon_step(); wrappers know.
  const bool say_so = strategy.starts_with("megatron") ? here : explicitly;
  if (say_so) trainer.training.abandon_step();
  for (const int64_t step : {20, 21, 22}) {
    trainer.step(step);
    good.push_back(step);
  }
  EXPECT_LT(difference(trainer.model->parameters(), reference(good)), 1e-12);
}

// no_shard and hybrid strategies reduce over groups of their own, whose transport this test does not replace;
// hook_faults_test.cpp covers no_shard.
bool sums_over_its_group(const std::string& strategy) {
  return strategy != "fsdp_no_shard" && !strategy.starts_with("fsdp_hybrid");
}

// Of the four ways in which a point can fail, two for each rank that fails: rank 0 and the last one have all together.
void try_all(const std::string& strategy, const std::vector<int>& faulty) {
  int number = group().size() + (faulty.front() > 0 ? 1 : 0);
  for (const auto point : {Point::forward, Point::first_gradient, Point::last_gradient, Point::collective}) {
    if (point == Point::collective && !sums_over_its_group(strategy)) continue;
    ++number;
    for (const bool explicitly : {true, false}) {
      for (const bool from_the_start : {true, false}) {
        if ((explicitly == from_the_start) != (number % 2 == 0)) continue;
        break_and_train_on(strategy, point, faulty, explicitly, from_the_start);
      }
    }
  }
  for (const auto point : {Point::before_gradients, Point::below}) {
    for (const bool from_the_start : {true, false}) {
      break_and_train_on(strategy, point, faulty, /*explicitly=*/false, from_the_start);
    }
  }
}

TEST_P(Faults, BEY10_an_exception_on_one_rank_ends_the_step_on_all_and_training_goes_on) {
  try_all(GetParam(), {0});
  try_all(GetParam(), {group().size() - 1});
}

TEST_P(Faults, BEY10_an_exception_on_all_ranks_is_everybodys_own) {
  std::vector<int> all(group().size());
  std::iota(all.begin(), all.end(), 0);
  try_all(GetParam(), all);
}

TEST_P(Faults, BEY10_an_exception_in_a_local_backward_loses_only_that_step) {
  Trainer trainer(GetParam());
  trainer.step(0);
  trainer.training.zero_grad();
  if (group().rank() == 0) trainer.model->fail = Point::last_gradient;
  {
    const auto local = trainer.training.no_sync(true);
    const auto backward = [&] { trainer.training.forward(batch(group().rank(), 10)).backward(); };
    if (group().rank() == 0) {
      EXPECT_THROW(backward(), Injected);
    } else {
      backward();
    }
  }
  trainer.model->fail.reset();
  if (!GetParam().starts_with("megatron")) trainer.training.abandon_step();  // on all ranks
  trainer.step(1);
  EXPECT_LT(difference(trainer.model->parameters(), reference({0, 1})), 1e-12);
}

TEST_P(Faults, BEY10_micro_batches_after_a_step_that_failed_are_a_step_of_their_own) {
  for (const auto& [point, broken] : std::vector<std::pair<Point, int64_t>>{
           {Point::forward, 0}, {Point::last_gradient, 0}, {Point::forward, 1}, {Point::last_gradient, 1}}) {
    SCOPED_TRACE(fmt::format("point {} of micro-batch {}", static_cast<int>(point), broken));
    Trainer trainer(GetParam());
    const bool fails = group().rank() == 0;
    for (const int64_t step : {0, 1, 2}) {
      try {
        trainer.training.zero_grad();
        for (const int64_t micro : {0, 1}) {
          if (fails && step == 1 && micro == broken) trainer.model->fail = point;
          const auto local = trainer.training.no_sync(micro == 0);
          trainer.training.forward(batch(group().rank(), step, micro)).backward();
        }
        trainer.training.step();
        EXPECT_NE(step, 1);
      } catch (const std::runtime_error& error) {
        EXPECT_EQ(step, 1) << error.what();
        trainer.model->fail.reset();
        // DistributedOptimizer sees no forward; and an exception under no_sync may be of a micro-batch that is left
        // out.
        if (fails && (GetParam().starts_with("megatron") || broken == 0)) trainer.training.abandon_step();
      }
    }
    torch::manual_seed(1);
    FaultyImpl model;
    torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    for (const int64_t step : {0, 2}) {
      optimizer.zero_grad();
      for (int rank = 0; rank < group().size(); ++rank) {
        for (const int64_t micro : {0, 1}) (model.forward(batch(rank, step, micro)) / group().size()).backward();
      }
      optimizer.step();
    }
    EXPECT_LT(difference(trainer.model->parameters(), model.parameters()), 1e-12);
  }
}

INSTANTIATE_TEST_SUITE_P(Strategies, Faults,
                         testing::Values("ddp", "zero1", "zero2", "megatron", "megatron_in_grads",
                                         "megatron_no_overlap", "megatron_late_gather", "fsdp", "fsdp_grad_op",
                                         "fsdp_no_shard", "fsdp_hybrid", "fsdp_hybrid_grad_op"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace shoal::faults_test
