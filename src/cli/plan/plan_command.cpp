// Command `shoal plan`: memory and communication of a training run, without running it.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>

#include "cli/commands.h"
#include "cli/plan/model_plan.h"
#include "cli/strategies/optimizers.h"
#include "cli/train/report.h"
#include "layout/model_bytes.h"
#include "models/registry.h"
#include "shoal/error.h"
#include "shoal/progress.h"
#include "training/hook_text.h"

namespace shoal::cli {
namespace {

using Json = nlohmann::ordered_json;

struct PlanOptions {
  std::optional<double> params;
  std::string strategy = "all";
  std::string json;
  TrainOptions train;
};

struct Formula {
  const char* strategy;
  Sharded memory;
  Sharded traffic;
};
constexpr Formula formulas[] = {{"ddp", Sharded::nothing, Sharded::nothing},
                                {"zero1", Sharded::state, Sharded::state},
                                {"megatron", Sharded::state, Sharded::gradients},
                                {"zero2", Sharded::gradients, Sharded::gradients},
                                {"fsdp", Sharded::parameters, Sharded::parameters}};

// Valid values of --strategy.
std::vector<std::string> plannable() {
  std::vector<std::string> names{"all"};
  for (const auto& formula : formulas) names.push_back(find_strategy(formula.strategy).name);
  return names;
}

ElementBytes element_bytes(const std::string& dtype, const std::string& optimizer) {
  constexpr double main_copy = 4;
  const double kept = state_per_element(optimizer);
  if (dtype == "float32") return {4, 4, 4 * kept};
  if (dtype == "float64") return {8, 8, 8 * kept};
  if (dtype == "mixed") return {2, 2, main_copy + 4 * kept};
  if (dtype == "mixed_fp32_grads") return {2, 4, main_copy + 4 * kept};
  throw UsageError(fmt::format("--dtype {}: with --params one of float32, float64, mixed, mixed_fp32_grads", dtype));
}

bool wanted(const PlanOptions& options, const std::string& strategy) {
  return options.strategy == "all" || options.strategy == strategy;
}

void finish(const PlanOptions& options, const std::string& table, const Json& report) {
  if (options.json != "-") fmt::print("{}", table);
  if (!options.json.empty()) write_json(options.json, report);
}

int plan_number(const PlanOptions& options) {
  const auto bytes = element_bytes(options.train.dtype, options.train.optimizer);
  const int ranks = options.train.ranks.value_or(2);
  constexpr double giga = 1e9;
  auto table = fmt::format("{:g} parameters, {} ranks, {}, {}; GB (10^9 bytes) per rank\n\n", *options.params, ranks,
                           options.train.dtype, options.train.optimizer);
  table += fmt::format("{:<10}{:>12}{:>12}{:>12}{:>12}{:>16}\n", "strategy", "parameters", "gradients", "state",
                       "total", "sent per step");
  Json report = {{"config",
                  {{"params", *options.params},
                   {"ranks", ranks},
                   {"dtype", options.train.dtype},
                   {"optimizer", options.train.optimizer}}},
                 {"strategies", Json::array()}};
  for (const auto& formula : formulas) {
    if (!wanted(options, formula.strategy)) continue;
    const auto memory = bytes_per_rank(*options.params, bytes, formula.memory, ranks);
    const auto sent = bytes_sent_per_step(*options.params, bytes, formula.traffic, ranks);
    table +=
        fmt::format("{:<10}{:>12.2f}{:>12.2f}{:>12.2f}{:>12.1f}{:>16.2f}\n", formula.strategy, memory.parameters / giga,
                    memory.gradients / giga, memory.state / giga, memory.total() / giga, sent / giga);
    report["strategies"].push_back({{"strategy", formula.strategy},
                                    {"memory",
                                     {{"params_bytes", memory.parameters},
                                      {"grads_bytes", memory.gradients},
                                      {"state_bytes", memory.state},
                                      {"total_bytes", memory.total()}}},
                                    {"sent_bytes_per_step", sent}});
  }
  table += "\nSent: the least that a rank sends, whatever the transport. fsdp: ZeRO-3.\n";
  finish(options, table, report);
  return 0;
}

Json json_of(const PlannedCalls& calls) {
  return {{"collectives", calls.calls}, {"bytes", calls.bytes}};
}

Json json_of(const std::string& strategy, const ModelPlan& plan) {
  Json memory;
  const auto put = [&](const char* name, int64_t RankMemory::*part) {
    for (const auto& rank : plan.ranks) memory[name].push_back(rank.*part);
  };
  put("params_bytes", &RankMemory::parameters);
  put("grads_bytes", &RankMemory::gradients);
  put("state_bytes", &RankMemory::state);
  put("buffers_bytes", &RankMemory::buffers);
  memory["params_once_per_host"] = plan.parameters_once;
  memory["params_gathered"] = plan.gathers;
  int64_t host = 0;
  for (const auto& rank : plan.ranks) host += rank.total();
  if (plan.parameters_once) host -= (static_cast<int64_t>(plan.ranks.size()) - 1) * plan.ranks.front().parameters;
  memory["host_bytes"] = host;
  return {{"strategy", strategy},
          {"memory", memory},
          {"communication",
           {{"first_step", json_of(plan.first_step)},
            {"rebuild", json_of(plan.rebuild)},
            {"plain_steps", plan.plain_steps},
            {"plain_step", json_of(plan.plain_step)},
            {"per_step", json_of(plan.per_step)}}}};
}

int plan_built_in(const PlanOptions& options) {
  constexpr double mebibyte = 1 << 20;
  const int ranks = options.train.ranks.value_or(2);
  const auto compress = options.train.compress();
  auto table = fmt::format("{} {} on {} rank(s), {}, {}{}; MiB of the rank that holds most\n\n", options.train.model,
                           options.train.size, ranks, options.train.dtype, options.train.optimizer,
                           compress == "none" ? "" : ", gradients as " + compress);
  table += fmt::format("{:<10}{:>12}{:>12}{:>12}{:>12}{:>12}{:>14}{:>14}\n", "strategy", "parameters", "gradients",
                       "state", "buffers", "all ranks", "collectives", "bytes/step");
  Json report = {{"config",
                  {{"model", options.train.model},
                   {"size", options.train.size},
                   {"ranks", ranks},
                   {"dtype", options.train.dtype},
                   {"optimizer", options.train.optimizer},
                   {"transport", options.train.transport},
                   {"compress", compress}}},
                 {"strategies", Json::array()}};
  bool once = false, gathers = false;
  std::map<at::ScalarType, PlannedModel> by_dtype;
  ProgressBar progress(options.strategy == "all" ? static_cast<int64_t>(std::size(formulas)) : 1,
                       {.unit = "strategies"});
  for (const auto& formula : formulas) {
    const auto* strategy = formula.strategy;
    if (!wanted(options, strategy)) continue;
    auto train = options.train;
    train.strategy = strategy;
    try {
      train.complete();
      train.check_strategy(ranks, /*hosts=*/1);
    } catch (const UsageError&) {
      // --strategy all: skips strategies that do not accept the hook.
      if (options.strategy == "all" && compress != "none") continue;
      throw;
    }
    auto& planned = by_dtype[train.precision().parameters];
    if (!planned.model) {
      planned.model = models::make_model(train.model, train.size, models::Init::torch, train.seed, train.data_dtype());
      train.precision().convert(*planned.model);
    }
    const auto plan = plan_model(train, planned, ranks);
    progress.update(1, strategy);
    const auto most = *std::max_element(plan.ranks.begin(), plan.ranks.end(),
                                        [](const auto& a, const auto& b) { return a.total() < b.total(); });
    report["strategies"].push_back(json_of(strategy, plan));
    const auto host = report["strategies"].back()["memory"]["host_bytes"].get<double>();
    table += fmt::format("{:<10}{:>11.3f}{}{:>12.3f}{:>12.3f}{:>12.3f}{:>12.3f}{:>14}{:>14}\n", strategy,
                         most.parameters / mebibyte, plan.parameters_once ? "*" : " ", most.gradients / mebibyte,
                         most.state / mebibyte, most.buffers / mebibyte, host / mebibyte, plan.per_step.calls,
                         plan.per_step.bytes);
    once = once || plan.parameters_once;
    gathers = gathers || plan.gathers;
  }
  progress.clear();
  if (gathers)
    table += "\nfsdp: and every unit's parameters, gathered when they are used; of these up to 3 units at a time\n";
  if (const auto plain = plain_steps(compress); plain > 0) {
    table += fmt::format("\n{}: from step {} on; until then gradients travel whole\n", compress, plain);
  }
  if (once) table += "\n* one copy for all ranks of the host\n";
  finish(options, table, report);
  return 0;
}

void check(PlanOptions& options) {
  const auto known = plannable();
  if (std::find(known.begin(), known.end(), options.strategy) == known.end()) {
    throw UsageError(fmt::format("--strategy {}: choose one of {}", options.strategy, fmt::join(known, ", ")));
  }
  if (options.params && !(*options.params > 0 && std::isfinite(*options.params))) {
    throw UsageError(fmt::format("--params {}: give a number above 0", *options.params));
  }
  options.train.data = "reference";
  auto train = options.train;
  if (options.strategy != "all") train.strategy = options.strategy;
  if (options.params) {
    element_bytes(train.dtype, "adamw");  // throws its own errors for unknown names
    train.dtype = "float32";
  }
  train.complete();
  if (options.strategy != "all") train.check_strategy(train.ranks.value_or(2), /*hosts=*/1);
  if (options.params) state_per_element(train.optimizer);
}

}  // namespace

void add_plan_command(CLI::App& app, Action& chosen) {
  auto* command = app.add_subcommand("plan", "estimate memory per rank and bytes per step without running a training");
  const auto options = std::make_shared<PlanOptions>();
  auto& train = options->train;
  auto* number = command->add_option("--params", options->params, "number of parameters; uses the published formulas");
  command->add_option("--model", train.model, "model: cnn, mlp, gpt; gives exact figures")
      ->excludes(number)
      ->capture_default_str();
  command->add_option("--size", train.size, "model size: tiny, small; gpt also large, gpt2")
      ->excludes(number)
      ->capture_default_str();
  command->add_option("--ranks", train.ranks, "default: 2");
  command->add_option("--strategy", options->strategy,
                      fmt::format("strategy: {}", fmt::join(plannable(), ", ")))
      ->capture_default_str();
  command
      ->add_option("--dtype", train.dtype,
                   "as for train; with --params float32, float64, mixed (16-bit parameters and gradients), "
                   "mixed_fp32_grads")
      ->capture_default_str();
  command->add_option("--optimizer", train.optimizer, fmt::format("{}", fmt::join(optimizer_names(), ", ")))
      ->capture_default_str();
  command
      ->add_option(
          "--transport", train.transport,
          "transport; auto and host: all ranks on one host, where sharded strategies have one copy of the parameters")
      ->excludes(number)
      ->capture_default_str();
  command
      ->add_option_function<std::string>(
          "--compress", [&train](const std::string& text) { train.strategy_options["compress"] = text; },
          "compression of gradients, as for train")
      ->excludes(number)
      ->default_str("none");
  command->add_option("--json", options->json, "write the figures as JSON to this file; - is standard output");
  command->callback([options, &chosen] {
    check(*options);
    chosen = [options] { return options->params ? plan_number(*options) : plan_built_in(*options); };
  });
}

}  // namespace shoal::cli
