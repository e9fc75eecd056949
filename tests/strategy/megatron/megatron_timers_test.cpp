// MEG13: DistributedOptimizer's timers.

#include <gmock/gmock.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <map>
#include <sstream>
#include <thread>

#include "shoal/error.h"
#include "shoal/megatron.h"
#include "tests/support/models.h"
#include "tests/support/refusal.h"
#include "tests/support/world.h"

namespace shoal::megatron_timers_test {
namespace {

using test::batch;
using test::group;
using test::mean_loss;
using test::Mlp;
using test::seeded;
using Sgd = DistributedOptimizer<torch::optim::SGD>;

const torch::optim::SGDOptions sgd(0.1);

std::map<std::string, int64_t> counts(const Timers& timers) {
  std::map<std::string, int64_t> map;
  for (const auto& timing : timers.result()) {
    EXPECT_TRUE(map.emplace(timing.name, timing.count).second) << timing.name << " twice";
    EXPECT_GE(timing.total_s, timing.max_s);
    EXPECT_LE(timing.total_s, timing.max_s * static_cast<double>(timing.count));
  }
  return map;
}

constexpr int steps = 3;

// Timers after some steps of a float16 model, and the number of barriers.
std::map<std::string, int64_t> train(const TimersOptions& options, bool overlap, int64_t& barriers) {
  const auto timers = std::make_shared<Timers>(options);
  auto log = std::make_shared<CallLog>();
  const auto recorded = group().recorded(log);
  auto model = seeded(1);
  model->to(at::kHalf);
  Sgd optimizer(model, sgd, recorded,
                {.overlap_grad_reduce = overlap,
                 .overlap_param_gather = overlap,
                 .clip_grad = 1,
                 .scaler = GradScalerOptions{.initial_scale = 1},
                 .timers = timers});
  if (!overlap) {
    optimizer.all_reduce_grads({model->first->weight}, recorded, "embedding");
    optimizer.all_reduce_grads({model->second->bias, model->third->bias}, recorded, "layernorm");
  }
  log->clear();
  for (int64_t step = 0; step < steps; ++step) {
    optimizer.scale_loss(mean_loss(model->forward(batch(group().rank(), step).to(at::kHalf)))).backward();
    EXPECT_TRUE(optimizer.step().updated);
    optimizer.zero_grad();
  }
  model->forward(batch(0, 0).to(at::kHalf));  // the last parameters come in
  barriers = log->count(Op::barrier);
  return counts(*timers);
}

TEST(MegatronTimers, MEG13_levels_say_what_is_measured) {
  const std::map<std::string, int64_t> level0{{"optimizer", steps}};
  const std::map<std::string, int64_t> level1{{"embedding-grads-all-reduce", steps},
                                              {"layernorm-grads-all-reduce", steps},
                                              {"grads-reduce-scatter", steps},
                                              {"params-all-gather", steps}};
  const std::map<std::string, int64_t> level2{
      {"optimizer-unscale-and-check-inf", steps}, {"optimizer-clip-main-grad", steps}, {"optimizer-inner-step", steps}};
  auto expected = level0;
  for (const int level : {0, 1, 2}) {
    if (level == 1) expected.insert(level1.begin(), level1.end());
    if (level == 2) expected.insert(level2.begin(), level2.end());
    for (const bool barrier : {false, true}) {
      int64_t barriers = 0;
      EXPECT_EQ(train({.level = level, .barrier = barrier}, false, barriers), expected) << "level " << level;
      const auto parts = static_cast<int64_t>(expected.size()) - 1;  // but the whole step
      EXPECT_EQ(barriers, barrier ? steps * parts : 0);
    }
  }
}

TEST(MegatronTimers, MEG13_what_overlaps_is_measured_where_it_is_waited_for) {
  int64_t barriers = 0;
  const auto seen = train({.level = 1, .barrier = true}, true, barriers);
  EXPECT_EQ(seen, (std::map<std::string, int64_t>{
                      {"optimizer", steps}, {"grads-reduce-scatter", steps}, {"params-all-gather", steps}}));
  EXPECT_EQ(barriers, 0);
}

// One rank is late for the reduction.
TEST(MegatronTimers, MEG13_with_barriers_a_late_rank_is_not_the_collectives_time) {
  if (group().size() == 1) GTEST_SKIP() << "nobody to wait for";
  for (const bool barrier : {false, true}) {
    const auto timers = std::make_shared<Timers>(TimersOptions{.level = 1, .barrier = barrier});
    auto model = seeded(1);
    Sgd optimizer(model, sgd, group(), {.overlap_grad_reduce = false, .timers = timers});
    mean_loss(model->forward(batch(group().rank(), 0))).backward();
    if (group().rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(600));
    optimizer.step();
    for (const auto& timing : timers->result()) {
      if (timing.name != "grads-reduce-scatter" || group().rank() == 0) continue;
      EXPECT_EQ(timing.max_s > 0.3, !barrier) << timing.max_s << " s";
    }
  }
}

TEST(MegatronTimers, MEG13_a_rank_may_give_up_a_step_that_is_measured) {
  const auto timers = std::make_shared<Timers>(TimersOptions{.level = 2, .barrier = true});
  auto model = seeded(1);
  auto reference = seeded(1);
  auto log = std::make_shared<CallLog>();
  Sgd optimizer(model, sgd, group().recorded(log), {.overlap_grad_reduce = false, .timers = timers});
  torch::optim::SGD whole(reference->parameters(), sgd);
  for (int64_t step = 0; step < 3; ++step) {
    if (step == 1 && group().rank() == 0) {
      optimizer.abandon_step();
    } else {
      log->clear();
      mean_loss(model->forward(batch(group().rank(), step))).backward();
      EXPECT_TRUE(log->records().empty()) << "only step() reduces, also after a step that was given up";
      if (step == 1) {
        EXPECT_THROW(optimizer.step(), StepAbandoned);
      } else {
        optimizer.step();
      }
    }
    optimizer.zero_grad();
    if (step == 1) continue;
    for (int rank = 0; rank < group().size(); ++rank) {
      (mean_loss(reference->forward(batch(rank, step))) / group().size()).backward();
    }
    whole.step();
    whole.zero_grad();
  }
  EXPECT_LT(test::difference(model->parameters(), reference->parameters()), 1e-12);
}

TEST(MegatronTimers, MEG13_results_are_readable) {
  Timers timers({.level = 1});
  for (const int milliseconds : {5, 20}) {
    timers.measure("forward", 1, [&] { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); });
  }
  timers.measure("detail", 2, [] {});
  EXPECT_THROW(timers.measure("failed", 0, [] { throw Error("here"); }), Error);
  const auto result = timers.result();
  ASSERT_EQ(result.size(), 1U) << "not what is above the level, nor what throws";
  EXPECT_EQ(result[0].name, "forward");
  EXPECT_EQ(result[0].count, 2);
  EXPECT_GE(result[0].max_s, 0.020);
  EXPECT_GE(result[0].total_s, result[0].max_s + 0.005);
  std::ostringstream stream;
  stream << timers;
  const auto text = stream.str();
  for (const auto* part : {"forward", "count", "total, ms", "longest, ms"}) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  }
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 2);
  timers.reset();
  EXPECT_TRUE(timers.result().empty());
  EXPECT_THROW(Timers({.level = 3}), UsageError);
  EXPECT_THROW(Timers({.level = -1}), UsageError);
}

TEST(MegatronTimers, MEG13_barriers_on_one_rank_alone_are_refused) {
  if (group().size() == 1) GTEST_SKIP() << "one rank agrees with itself";
  auto model = seeded(1);
  const auto make = [&](const TimersOptions& first, const TimersOptions& others) {
    const auto timers = std::make_shared<Timers>(group().rank() == 0 ? first : others);
    return test::refusal<DisagreeError>([&] { const Sgd optimizer(model, sgd, group(), {.timers = timers}); });
  };
  EXPECT_THAT(make({.barrier = true}, {}), testing::HasSubstr("rank 0 has timers with barrier, of level 0"));
  EXPECT_THAT(make({.level = 1, .barrier = true}, {.barrier = true}), testing::HasSubstr("of level 1"));
  EXPECT_EQ(make({.level = 2}, {}), test::refusal([] {})) << "each measures for itself";
}

}  // namespace
}  // namespace shoal::megatron_timers_test
