// shoal::bench_strategies for a model of a program's own.

#include "shoal/bench.h"

#include <gmock/gmock.h>
#include <torch/optim/adamw.h>

#include <chrono>
#include <memory>
#include <sstream>
#include <thread>

#include "planning/measured_step.h"
#include "shoal/optim.h"
#include "shoal/training.h"
#include "tests/planning/own_module.h"
#include "tests/support/refusal.h"
#include "tests/support/world.h"

namespace shoal::test {
namespace {

using testing::HasSubstr;

StrategyBench measured(const StrategyBenchOptions& options) {
  return bench_strategies([] { return std::make_shared<OwnModule>(); },
                          [](auto& model) { return own_loss(model, group().rank()); },
                          optimizer_recipe<FusedAdamW>(1e-3), group(), options);
}

TEST(BenchStrategies, SCA03_BEY20_ones_own_model_is_measured_beside_compute_alone) {
  const auto bench =
      measured({.strategies = {"local", "ddp", "zero2", "fsdp"}, .steps = 8, .rounds = 2, .accumulate = 2});
  ASSERT_EQ(bench.strategies.size(), 4U);
  ASSERT_NE(bench.local(), nullptr);
  const double parameters_mib = (200 * 64 + 64 * 256 + 256 + 2 * 256 + 256 * 64 + 64 + 256 * 257) * 4 / double(1 << 20);
  for (const auto& figures : bench.strategies) {
    SCOPED_TRACE(figures.strategy);
    ASSERT_EQ(figures.rounds.size(), 2U);
    for (const auto& round : figures.rounds) {
      EXPECT_EQ(round.step_ms.size(), 5U) << "three warm up";
      EXPECT_GT(*round.compute_ms, 0);
      EXPECT_LE(*round.compute_ms + *round.exposed_comm_ms + *round.update_ms, 1.01 * figures.step_ms().max);
    }
    EXPECT_GT(figures.step_ms().min, 0);
    EXPECT_GT(figures.ratio_to(*bench.local()).min, 0);
    const bool alone = figures.strategy == "local";
    EXPECT_EQ(figures.transport, alone ? "none" : group().transport());
    EXPECT_EQ(figures.median(&BenchRound::collectives_per_step) == 0.0, alone);
    EXPECT_FALSE(figures.median(&BenchRound::growth_mib)) << "they share a process";
  }
  EXPECT_DOUBLE_EQ(bench.local()->ratio_to(*bench.local()).median, 1);
  EXPECT_NEAR(*bench.strategies[1].median(&BenchRound::params_mib), parameters_mib, 1e-6);
  std::ostringstream shown;
  shown << bench;
  EXPECT_THAT(shown.str(),
              testing::StartsWith("by        strategy   over      step ms     min ms   compute   exposed"));
  EXPECT_THAT(shown.str(), HasSubstr("\nshoal     fsdp "));
  // The same on all ranks.
  agree(group(), "the table", {shown.str()});
}

// With ranks that own a part each, the optimizer's step ends with the parts of the others.
TEST(BenchStrategies, the_wait_for_a_late_rank_is_no_update) {
  if (group().transport() != "tcp" || group().size() == 1) GTEST_SKIP() << "shared memory is waited for in other ways";
  const auto model = std::make_shared<OwnModule>();
  const auto training = make_training("zero1", model, optimizer_recipe<FusedAdamW>(1e-3), group());
  constexpr int late_ms = 200;
  double wait = 0, update = 0;
  for (int number = 0; number < 2; ++number) {
    auto step = measured_gradients(*training, number, 1, [&](int) { return own_loss(*model, group().rank()); });
    const double before = step.wait_ms;
    if (group().rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(late_ms));
    measured_update(*training, number, /*gradients=*/false, step);
    wait = step.wait_ms - before;
    update = step.update_ms;
    EXPECT_GT(step.calls, 0);
  }
  if (group().rank() == 1) return;
  EXPECT_GT(wait, 0.7 * late_ms);
  EXPECT_LT(update, 0.7 * late_ms);
}

TEST(BenchStrategies, SCA03_each_strategy_takes_its_own_options) {
  const auto bench = measured(
      {.strategies = {"ddp", "zero2"},
       .steps = 4,
       .rounds = 1,
       .training = {
           .options = {{"bucket_cap_mb", "0.05"}, {"first_bucket_mb", "0.05"}, {"reduce_buffer_size", "8388608"}}}});
  const auto whole = measured({.strategies = {"ddp"}, .steps = 4, .rounds = 1});
  EXPECT_GT(bench.strategies[0].median(&BenchRound::collectives_per_step),
            whole.strategies[0].median(&BenchRound::collectives_per_step))
      << "more buckets";
}

TEST(BenchStrategies, SCA03_wrong_input_is_refused_in_one_sentence_on_every_rank) {
  const auto said = [](const StrategyBenchOptions& options) { return refusal([&] { measured(options); }); };
  EXPECT_THAT(said({.strategies = {"zero9"}}), HasSubstr("unknown strategy 'zero9'; choose from "));
  EXPECT_EQ(said({.strategies = {}}), "bench_strategies: there are no strategies; name some of strategy_names()");
  EXPECT_EQ(said({.steps = 3}), "bench_strategies: 3 steps; give at least 4: 3 of them warm up");
  EXPECT_EQ(said({.rounds = 0}), "bench_strategies: 0 rounds; give at least 1");
  EXPECT_EQ(said({.accumulate = 0}), "bench_strategies: 0 micro-batches per step; give at least 1");
  EXPECT_THAT(said({.training = {.options = {{"bucket_cap", "1"}}}}),
              HasSubstr("option bucket_cap: none of local, ddp has it"));
  EXPECT_THAT(refusal([] {
                bench_strategies([] { return std::make_shared<OwnModule>(); },
                                 [](auto& model) { return model.forward(own_tokens(0)); },
                                 optimizer_recipe<FusedAdamW>(1e-3), group());
              }),
              HasSubstr("the loss is a tensor of shape [8, 200]; return one number"));
  if (group().size() == 1) return;
  EXPECT_THAT(refusal<DisagreeError>([] { measured({.steps = group().rank() == 0 ? 5 : 6}); }),
              HasSubstr("the options of bench_strategies"));
}

}  // namespace
}  // namespace shoal::test
