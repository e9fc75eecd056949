#include "shoal/plan.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <ostream>

#include "planning/own_options.h"
#include "planning/strategy_plan.h"

namespace shoal {

const RankMemory& StrategyPlan::largest() const {
  return *std::max_element(ranks.begin(), ranks.end(),
                           [](const auto& a, const auto& b) { return a.total() < b.total(); });
}

int64_t StrategyPlan::total() const {
  int64_t bytes = 0;
  for (const auto& rank : ranks) bytes += rank.total();
  return parameters_once ? bytes - (static_cast<int64_t>(ranks.size()) - hosts) * ranks.front().parameters : bytes;
}

std::string Plan::table() const {
  constexpr double mebibyte = 1 << 20;
  auto text = fmt::format("{:<10}{:>12}{:>12}{:>12}{:>12}{:>12}{:>14}{:>14}\n", "strategy", "parameters", "gradients",
                          "state", "buffers", "all ranks", "collectives", "bytes/step");
  int64_t plain = 0;
  bool once = false, gathers = false;
  for (const auto& plan : strategies) {
    const auto& most = plan.largest();
    text += fmt::format("{:<10}{:>11.3f}{}{:>12.3f}{:>12.3f}{:>12.3f}{:>12.3f}{:>14}{:>14}\n", plan.strategy,
                        most.parameters / mebibyte, plan.parameters_once ? "*" : " ", most.gradients / mebibyte,
                        most.state / mebibyte, most.buffers / mebibyte, plan.total() / mebibyte, plan.per_step.calls,
                        plan.per_step.bytes);
    plain = std::max(plain, plan.plain_steps);
    once = once || plan.parameters_once;
    gathers = gathers || plan.gathers;
  }
  if (gathers) {
    text +=
        "\nfsdp: and every unit's parameters, gathered when they are used; of these up to 3 units at a time.\n"
        "The bytes per step are without these gathers\n";
  }
  for (const auto& plan : strategies) {
    if (plan.hosts == 1) continue;
    text += fmt::format(
        "\n{}: each of {} hosts has all of it; of a rank's collectives and bytes, {} and {} are between hosts\n",
        plan.strategy, plan.hosts, plan.between_hosts.calls, plan.between_hosts.bytes);
  }
  for (const auto& plan : strategies) {
    if (plan.to_second_owners.calls == 0) continue;
    text += fmt::format(
        "\n{}: each shard has a second owner: {:.3f} MiB more per rank, and per step {} messages and collectives of {} "
        "bytes, "
        "half of\nwhich the rank sends and half receives while backward computes\n",
        plan.strategy, plan.largest().second_owner_bytes / mebibyte, plan.to_second_owners.calls,
        plan.to_second_owners.bytes);
  }
  if (plain > 0) text += fmt::format("\nfrom step {} on; until then gradients travel whole\n", plain);
  if (once) text += "\n* one copy for all ranks of the host\n";
  return text;
}

std::ostream& operator<<(std::ostream& out, const Plan& plan) {
  return out << plan.table();
}

std::vector<std::string> plannable_strategies() {
  return {"ddp", "zero1", "megatron", "zero2", "fsdp", "hybrid"};
}

Plan plan(const std::shared_ptr<torch::nn::Module>& module, const OptimizerRecipe& recipe, const PlanOptions& options) {
  auto names = options.strategies.empty() ? plannable_strategies() : options.strategies;
  if (options.strategies.empty() && options.hosts == 1) std::erase(names, "hybrid");  // the same as fsdp there
  PlannedModule planned{.module = module, .loss = options.loss};
  Plan result;
  for (const auto& name : names) {
    result.strategies.push_back(plan_strategy(name, planned, recipe, own_options("plan", name, names, options.training),
                                              options.ranks, options.hosts, options.one_host, options.elastic));
  }
  return result;
}

}  // namespace shoal
