#pragma once
// Bench of the strategies on a program's own model: the time of a step, beside that of compute alone.

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "shoal/group.h"
#include "shoal/training.h"

namespace shoal {

struct StrategyBenchOptions {
  // Names of the registry. `local`: ranks that never communicate, whose step time is compute alone.
  std::vector<std::string> strategies = {"local", "ddp"};
  int steps = 13;      // of a run, three of them warm-up
  int rounds = 3;      // each runs every strategy once, in turn
  int accumulate = 1;  // micro-batches per step
  // As for make_training(). Each strategy takes those of training.options that it has.
  TrainingOptions training{};
};

// Figures of one run.
struct BenchRound {
  std::vector<double> step_ms;  // of the slowest rank, without the warm-up
  // Medians of rank 0's steps: what is left of them, the wait for communication, the optimizer's step.
  std::optional<double> compute_ms{}, exposed_comm_ms{}, update_ms{};
  std::optional<double> wire_bytes_per_step{};                   // of all ranks, over TCP
  std::optional<double> collectives_per_step{};                  // of a rank
  std::optional<double> params_mib{}, grads_mib{}, state_mib{};  // of the rank that holds most
  std::optional<double> growth_mib{};  // of the process; none where strategies take turns in one process

  double median_ms() const;
};

struct ValueRange {
  double min = 0;
  double median = 0;
  double max = 0;
};

struct StrategyFigures {
  std::string strategy;
  std::string transport;     // "none" for strategies that do not communicate
  std::string by = "shoal";  // or "python"
  std::vector<BenchRound> rounds{};

  ValueRange step_ms() const;  // of the steps of all rounds
  // Median over the rounds; none if a round lacks it.
  std::optional<double> median(std::optional<double> BenchRound::*part) const;
  // Ratio of the step times to those of `base`, round by round.
  ValueRange ratio_to(const StrategyFigures& base) const;
};

struct StrategyBench {
  std::vector<StrategyFigures> strategies;

  // Figures of `local`; null: it was not measured.
  const StrategyFigures* local() const;
  // One row for each strategy; "x local" is the ratio of the step time to that of compute alone.
  std::string table() const;
};
std::ostream& operator<<(std::ostream& out, const StrategyBench& bench);

namespace detail {

// Training of one run, and the forward of a micro-batch.
struct BenchedTraining {
  std::shared_ptr<TrainingCore> core;
  std::shared_ptr<torch::nn::Module> module;
  std::function<at::Tensor()> loss;
};
using MakeBenched = std::function<BenchedTraining(const std::string& strategy, const TrainingOptions& options)>;

StrategyBench bench_strategies(const MakeBenched& make, const Group& group, const StrategyBenchOptions& options);

}  // namespace detail

// Trains a model of the program's own under each strategy, and measures its steps. make_module returns a new module (a
// shared_ptr or a module holder); loss gets a Training<Module>&, with which it runs the forward of a micro-batch, and
// returns the loss.
//
//   const auto bench = shoal::bench_strategies(
//       [] { return std::make_shared<MyModel>(); },
//       [&](auto& model) { return cross_entropy(model.forward(x), y); },
//       shoal::optimizer_recipe<shoal::FusedAdamW>(1e-3), world.group(), {.strategies = {"local", "ddp", "fsdp"}});
//   if (world.rank() == 0) std::cout << bench;
//
// Collective; the result is the same on all ranks. The strategies take turns in the caller's processes, over the
// group's transport; `shoal bench --train` starts programs instead, so that it can measure the growth of a process.
// UsageError for unknown strategies, for options that no measured strategy has, and for a loss that is not one number
// with a gradient; DisagreeError if ranks give other options; and the errors of make_training().
template <class MakeModule, class Loss>
StrategyBench bench_strategies(const MakeModule& make_module, const Loss& loss, const OptimizerRecipe& recipe,
                               const Group& group, const StrategyBenchOptions& options = {}) {
  const auto make = [&](const std::string& strategy, const TrainingOptions& of_strategy) {
    auto made = make_training(strategy, make_module(), recipe, group, of_strategy);
    const auto training = std::make_shared<decltype(made)>(std::move(made));
    return detail::BenchedTraining{.core = {training, training->operator->()},
                                   .module = training->module(),
                                   .loss = [training, &loss]() -> at::Tensor { return loss(*training); }};
  };
  return detail::bench_strategies(make, group, options);
}

}  // namespace shoal
