#include "shoal/bench.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <ostream>

#include "planning/bytes_over_tcp.h"
#include "planning/measured_step.h"
#include "planning/one_number.h"
#include "planning/own_options.h"
#include "planning/samples.h"

namespace shoal {
namespace {

constexpr int warm_up = 3;  // steps of each run that are left out of the figures
const Label label{-1, -1, "bench"};

ValueRange range_of(const Samples& samples) {
  return {samples.min(), samples.median(), samples.max()};
}

// Collective.
std::vector<double> slowest(const Group& group, const std::vector<double>& values) {
  auto all = at::tensor(values, at::kDouble);
  group.all_reduce(all, ReduceOp::max, label).wait();
  return {all.data_ptr<double>(), all.data_ptr<double>() + all.numel()};
}

// Collective.
std::vector<double> of_rank_0(const Group& group, const std::vector<double>& values) {
  auto all = at::tensor(values, at::kDouble);
  group.broadcast(all, /*root=*/0, label).wait();
  return {all.data_ptr<double>(), all.data_ptr<double>() + all.numel()};
}

BenchRound run(const detail::BenchedTraining& training, const Group& group, const StrategyBenchOptions& options) {
  std::vector<double> step_ms;
  Samples own, wait, update;
  double grads_mib = 0;
  const auto loss = [&](int) {
    const auto value = training.loss();
    require_one_number("bench_strategies", value);
    return value;
  };
  const auto wire = bytes_over_tcp();  // before any rank can send what is measured
  group.barrier(label).wait();
  const auto before = training.core->statistics();
  for (int number = 0; number < options.steps; ++number) {
    const auto start = Clock::now();
    const auto step = measured_step(*training.core, number, options.accumulate, loss, /*gradients=*/number == 0);
    const auto duration = std::chrono::duration<double, std::milli>(Clock::now() - start).count();
    if (number == 0) grads_mib = step.grads_mib;
    if (number < warm_up) continue;
    own.values.push_back(duration);
    wait.values.push_back(step.wait_ms);
    update.values.push_back(step.update_ms);
  }
  const auto calls = training.core->statistics().calls - before.calls;
  auto received = at::full({1}, bytes_over_tcp() - wire, at::kLong);
  group.barrier(label).wait();
  group.all_reduce(received, ReduceOp::sum, label).wait();
  const double steps = options.steps;
  const auto first = of_rank_0(group, {own.median() - wait.median() - update.median(), wait.median(), update.median(),
                                       received.item<double>() / steps, static_cast<double>(calls) / steps});
  const auto most =
      slowest(group, {mebibytes(training.core->parameters()), grads_mib, state_mib(*training.core, *training.module)});
  return {.step_ms = slowest(group, own.values),
          .compute_ms = first[0],
          .exposed_comm_ms = first[1],
          .update_ms = first[2],
          .wire_bytes_per_step = first[3],
          .collectives_per_step = first[4],
          .params_mib = most[0],
          .grads_mib = most[1],
          .state_mib = most[2]};
}

void check(const StrategyBenchOptions& options, const Group& group) {
  const auto refuse = [](const std::string& fault) { throw UsageError("bench_strategies: " + fault); };
  if (options.strategies.empty()) refuse("there are no strategies; name some of strategy_names()");
  if (options.steps <= warm_up) {
    refuse(fmt::format("{} steps; give at least {}: {} of them warm up", options.steps, warm_up + 1, warm_up));
  }
  if (options.rounds < 1) refuse(fmt::format("{} rounds; give at least 1", options.rounds));
  if (options.accumulate < 1) refuse(fmt::format("{} micro-batches per step; give at least 1", options.accumulate));
  for (const auto& name : options.strategies) {
    const auto& strategy = find_strategy(name);
    const auto training = own_options("bench_strategies", name, options.strategies, options.training);
    const auto values = option_values(strategy, training.options);
    if (strategy.check) strategy.check(values, training, group.size(), std::nullopt);
  }
}

// One line for each option, to be compared over ranks.
std::vector<std::string> lines_of(const StrategyBenchOptions& options) {
  std::vector<std::string> lines{
      fmt::format("strategies {}", fmt::join(options.strategies, ", ")),
      fmt::format("{} steps, {} rounds, {} micro-batches per step", options.steps, options.rounds, options.accumulate)};
  for (const auto& [name, value] : options.training.options) lines.push_back(fmt::format("{} {}", name, value));
  return lines;
}

}  // namespace

double BenchRound::median_ms() const {
  return Samples{step_ms}.median();
}

ValueRange StrategyFigures::step_ms() const {
  Samples all;
  for (const auto& round : rounds) {
    all.values.insert(all.values.end(), round.step_ms.begin(), round.step_ms.end());
  }
  return range_of(all);
}

std::optional<double> StrategyFigures::median(std::optional<double> BenchRound::*part) const {
  Samples all;
  for (const auto& round : rounds) {
    if (!(round.*part)) return std::nullopt;
    all.values.push_back(*(round.*part));
  }
  return all.median();
}

ValueRange StrategyFigures::ratio_to(const StrategyFigures& base) const {
  Samples all;
  for (size_t i = 0; i < rounds.size(); ++i) all.values.push_back(rounds[i].median_ms() / base.rounds[i].median_ms());
  return range_of(all);
}

const StrategyFigures* StrategyBench::local() const {
  const auto found = std::find_if(strategies.begin(), strategies.end(), [](const auto& figures) {
    return figures.strategy == "local" && figures.by == "shoal";
  });
  return found == strategies.end() ? nullptr : &*found;
}

std::string StrategyBench::table() const {
  const auto shown = [](const std::optional<double>& value, int digits) {
    return value ? fmt::format("{:.{}f}", *value, digits) : "-";
  };
  auto text =
      fmt::format("{:<9} {:<10} {:<6} {:>10} {:>10} {:>9} {:>9} {:>9} {:>12} {:>9} {:>8}\n", "by", "strategy", "over",
                  "step ms", "min ms", "compute", "exposed", "update", "wire B/step", "growth MiB", "x local");
  for (const auto& figures : strategies) {
    const auto step = figures.step_ms();
    const auto* base = local();
    text += fmt::format(
        "{:<9} {:<10} {:<6} {:>10.3f} {:>10.3f} {:>9} {:>9} {:>9} {:>12} {:>9} {:>8}\n", figures.by, figures.strategy,
        figures.transport, step.median, step.min, shown(figures.median(&BenchRound::compute_ms), 3),
        shown(figures.median(&BenchRound::exposed_comm_ms), 3), shown(figures.median(&BenchRound::update_ms), 3),
        shown(figures.median(&BenchRound::wire_bytes_per_step), 0), shown(figures.median(&BenchRound::growth_mib), 1),
        base == nullptr ? "-" : shown(figures.ratio_to(*base).median, 3));
  }
  return text;
}

std::ostream& operator<<(std::ostream& out, const StrategyBench& bench) {
  return out << bench.table();
}

StrategyBench detail::bench_strategies(const MakeBenched& make, const Group& group,
                                       const StrategyBenchOptions& options) {
  agree(group, "the options of bench_strategies", lines_of(options));
  check(options, group);
  StrategyBench bench;
  for (const auto& name : options.strategies) {
    const auto synchronization = find_strategy(name).synchronization;
    const bool alone =
        synchronization == Synchronization::independent || synchronization == Synchronization::single_rank;
    bench.strategies.push_back({.strategy = name, .transport = alone ? "none" : group.transport()});
  }
  for (int round = 0; round < options.rounds; ++round) {
    for (auto& figures : bench.strategies) {
      const auto& name = figures.strategy;
      const auto training = make(name, own_options("bench_strategies", name, options.strategies, options.training));
      figures.rounds.push_back(run(training, group, options));
    }
  }
  return bench;
}

}  // namespace shoal
