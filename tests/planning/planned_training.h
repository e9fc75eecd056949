#pragma once
// Comparison of a plan with the training that it is for.

#include <gtest/gtest.h>

#include "planning/measured_step.h"
#include "shoal/plan.h"
#include "tests/support/world.h"

namespace shoal::test {

// Those of `options` that the strategy has.
inline StrategyOptions own_options(const std::string& strategy, StrategyOptions options) {
  std::erase_if(options, [&](const auto& entry) { return !find_strategy(strategy).has(entry.first); });
  return options;
}

// Trains four steps under each strategy, and compares collectives, bytes and memory of this rank with the plan's. make:
// returns an equal module each time, in the precision's dtype. loss: of a module or a training, on the data of a rank.
template <class Make, class Loss>
void expect_training_does_what_was_planned(const Make& make, const Loss& loss, const OptimizerRecipe& recipe,
                                           const TrainingOptions& training_options,
                                           const std::vector<std::string>& strategies = plannable_strategies(),
                                           int hosts = 1) {
  const auto& ranks = group();
  const auto module = make();
  const auto planned = plan(module, recipe,
                            {.ranks = ranks.size(),
                             .strategies = strategies,
                             .hosts = hosts,
                             .one_host = ranks.transport() == "host",
                             .loss = [&] { return loss(*module, 0); },
                             .training = training_options});
  ASSERT_EQ(planned.strategies.size(), strategies.size());
  for (const auto& expected : planned.strategies) {
    SCOPED_TRACE(expected.strategy);
    const auto log = std::make_shared<CallLog>();
    auto options = training_options;
    options.options = own_options(expected.strategy, options.options);
    auto training = make_training(expected.strategy, make(), recipe, ranks.recorded(log), options);
    log->clear();
    const auto before = training->statistics();
    constexpr int steps = 4;
    double grads_mib = 0;
    for (int step = 0; step < steps; ++step) {
      training->backward(loss(training, ranks.rank()));
      EXPECT_TRUE(training->step());
      if (step == 0) grads_mib = mebibytes(training->gradients());
      training->zero_grad();
    }
    int64_t bytes = 0;
    for (const auto& record : log->records()) bytes += record.bytes;
    const auto calls = static_cast<int64_t>(log->records().size());
    const auto counted = training->statistics() - before;
    EXPECT_EQ(counted.calls, calls);
    EXPECT_EQ(counted.bytes, bytes);
    const int64_t plain = std::clamp<int64_t>(expected.plain_steps - 1, 0, steps - 1);
    const auto total = [&](int64_t PlannedCalls::*part) {
      return expected.first_step.*part + expected.rebuild.*part + plain * (expected.plain_step.*part) +
             (steps - 1 - plain) * (expected.per_step.*part);
    };
    // Shares of compressed gradients may differ by rank; the plan is rank 0's.
    const bool equal_bytes = !options.options.contains("compress") || expected.strategy == "ddp" || ranks.rank() == 0;
    if (expected.gathers) {
      EXPECT_LE(total(&PlannedCalls::calls), calls);
      if (equal_bytes) {
        EXPECT_LE(total(&PlannedCalls::bytes), bytes);
      }
    } else if (expected.hosts == 1 || recipe.element_wise ||
               ranks.rank() == 0) {  // each rank sends the parameters that it owns
      EXPECT_EQ(total(&PlannedCalls::calls), calls);
      if (equal_bytes) {
        EXPECT_EQ(total(&PlannedCalls::bytes), bytes);
      }
    }
    const auto& memory = expected.ranks.at(ranks.rank());
    const auto expect_near = [](double mib, int64_t planned_bytes, const char* what) {
      const double expected_mib = static_cast<double>(planned_bytes) / (1 << 20);
      EXPECT_NEAR(mib, expected_mib, 0.05 * expected_mib + 1e-3) << what;
    };
    expect_near(mebibytes(training->parameters()), memory.parameters, "parameters");
    expect_near(grads_mib, memory.gradients, "gradients");
    expect_near(state_mib(*training, *training.module()), memory.state, "state");
    expect_near(mebibytes(training.module()->buffers()), memory.buffers, "buffers");
  }
}

}  // namespace shoal::test
