// Command `shoal plan`: memory and communication of a training run, without running it.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <map>

#include "cli/commands.h"
#include "cli/strategies/optimizers.h"
#include "cli/strategies/strategy_options.h"
#include "cli/train/report.h"
#include "cli/writable.h"
#include "data/reference.h"
#include "layout/model_bytes.h"
#include "models/loss.h"
#include "models/registry.h"
#include "planning/strategy_plan.h"
#include "shoal/error.h"
#include "shoal/progress.h"
#include "training/hook_text.h"

namespace shoal::cli {
namespace {

using Json = nlohmann::ordered_json;

struct CommandOptions {
  std::optional<double> params;
  std::string strategy = "all";
  int hosts = 1;
  bool elastic = false;
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
  auto names = plannable_strategies();
  names.insert(names.begin(), "all");
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

bool wanted(const CommandOptions& options, const std::string& strategy) {
  return options.strategy == "all" || options.strategy == strategy;
}

// Without: --strategy all skips it.
bool has_dtype(const std::string& strategy, const TrainOptions& train) {
  const auto names = precision_names(strategy);
  return std::find(names.begin(), names.end(), train.dtype) != names.end();
}

void finish(const CommandOptions& options, const std::string& table, const Json& report) {
  if (options.json != "-") fmt::print("{}", table);
  if (!options.json.empty()) write_json(options.json, report);
}

std::string in_giga(double bytes, int decimals = 2) {
  const double value = bytes / 1e9;
  return value > 0 && value < 1 ? fmt::format("{:.3g}", value) : fmt::format("{:.{}f}", value, decimals);
}

int plan_number(const CommandOptions& options) {
  const auto bytes = element_bytes(options.train.dtype, options.train.optimizer);
  const int ranks = options.train.ranks.value_or(2);
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
    table += fmt::format("{:<10}{:>12}{:>12}{:>12}{:>12}{:>16}\n", formula.strategy, in_giga(memory.parameters),
                         in_giga(memory.gradients), in_giga(memory.state), in_giga(memory.total(), 1), in_giga(sent));
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

Json json_of(const StrategyPlan& plan) {
  Json memory;
  const auto put = [&](const char* name, int64_t RankMemory::*part) {
    for (const auto& rank : plan.ranks) memory[name].push_back(rank.*part);
  };
  put("params_bytes", &RankMemory::parameters);
  put("grads_bytes", &RankMemory::gradients);
  put("state_bytes", &RankMemory::state);
  put("buffers_bytes", &RankMemory::buffers);
  if (plan.to_second_owners.calls > 0) put("second_bytes", &RankMemory::second_owner_bytes);
  memory["params_once_per_host"] = plan.parameters_once;
  memory["params_gathered"] = plan.gathers;
  memory["all_ranks_bytes"] = plan.total();
  return {{"strategy", plan.strategy},
          {"hosts", plan.hosts},
          {"memory", memory},
          {"communication",
           {{"first_step", json_of(plan.first_step)},
            {"rebuild", json_of(plan.rebuild)},
            {"plain_steps", plan.plain_steps},
            {"plain_step", json_of(plan.plain_step)},
            {"per_step", json_of(plan.per_step)},
            {"between_hosts", json_of(plan.between_hosts)},
            {"to_second_owners", json_of(plan.to_second_owners)}}}};
}

// Loss of a short sample, for the order of gradients.
std::function<at::Tensor()> short_loss(const TrainOptions& options, const std::shared_ptr<models::Model>& model) {
  auto sample = data::reference_batch(options.model, options.size, {}, 1, options.data_dtype());
  constexpr int64_t tokens = 4;  // of a text; the order is that of any length
  if (!sample.data.is_floating_point()) {
    sample = {sample.data.slice(1, 0, tokens), sample.target.slice(1, 0, tokens)};
  }
  return [model, sample, precision = options.precision()] {
    return models::loss_of(model->forward(precision.input(sample.data)), sample.target);
  };
}

int plan_built_in(const CommandOptions& options) {
  const int ranks = options.train.ranks.value_or(2);
  const bool one_host = options.train.transport == "auto" || options.train.transport == "host";
  const auto compress = options.train.compress();
  Json report = {{"config",
                  {{"model", options.train.model},
                   {"size", options.train.size},
                   {"ranks", ranks},
                   {"hosts", options.hosts},
                   {"dtype", options.train.dtype},
                   {"optimizer", options.train.optimizer},
                   {"transport", options.train.transport},
                   {"compress", compress}}},
                 {"strategies", Json::array()}};
  Plan plan;
  std::map<at::ScalarType, PlannedModule> by_dtype;
  std::vector<std::string> left_out;
  auto names = plannable_strategies();
  if (options.strategy == "all" && options.hosts == 1) std::erase(names, "hybrid");
  ProgressBar progress(options.strategy == "all" ? static_cast<int64_t>(names.size()) : 1, {.unit = "strategies"});
  for (const auto& strategy : names) {
    if (!wanted(options, strategy)) continue;
    if (options.strategy == "all" && !has_dtype(strategy, options.train)) {
      left_out.push_back(strategy);
      continue;
    }
    auto train = options.train;
    train.strategy = strategy;
    train.complete();
    try {
      train.check_strategy(ranks, options.hosts);
    } catch (const UsageError&) {
      // --strategy all: skips strategies that do not accept the hook.
      if (options.strategy != "all" || compress == "none") throw;
      train.strategy_options.erase("compress");
      train.check_strategy(ranks, options.hosts);
      continue;
    }
    auto& planned = by_dtype[train.precision().parameters];
    if (!planned.module) {
      const auto model =
          models::make_model(train.model, train.size, models::Init::torch, train.seed, train.data_dtype());
      train.precision().convert(*model);
      planned = {.module = model, .loss = short_loss(train, model)};
    }
    plan.strategies.push_back(plan_strategy(strategy, planned, recipe_of(train), train.training_options(), ranks,
                                            options.hosts, one_host, options.elastic));
    report["strategies"].push_back(json_of(plan.strategies.back()));
    progress.update(1, strategy);
  }
  progress.clear();
  const auto title = fmt::format("{} {} on {} rank(s), {}, {}{}; MiB of the rank that holds most\n\n",
                                 options.train.model, options.train.size, ranks, options.train.dtype,
                                 options.train.optimizer, compress == "none" ? "" : ", gradients as " + compress);
  const auto note =
      left_out.empty() ? "" : fmt::format("\nWithout {}: {}\n", options.train.dtype, fmt::join(left_out, ", "));
  finish(options, title + plan.table() + note, report);
  return 0;
}

void check(CommandOptions& options) {
  const auto known = plannable();
  if (std::find(known.begin(), known.end(), options.strategy) == known.end()) {
    throw UsageError(fmt::format("--strategy {}: choose one of {}", options.strategy, fmt::join(known, ", ")));
  }
  constexpr double most_params = 1e15;
  if (options.params && !(*options.params > 0 && *options.params <= most_params)) {
    throw UsageError(fmt::format("--params {}: give a number above 0, at most {}", *options.params, most_params));
  }
  const int ranks = options.train.ranks.value_or(2);
  if (options.hosts < 1 || ranks % options.hosts != 0) {
    throw UsageError(fmt::format("--hosts {}: give a number that divides --ranks {}", options.hosts, ranks));
  }
  if (options.hosts > 1 && options.train.transport != "auto") {
    throw UsageError(
        fmt::format("--transport {}: ranks on several hosts are planned for auto", options.train.transport));
  }
  if (options.params && options.strategy == "hybrid") {
    throw UsageError("--strategy hybrid: with --params, plan fsdp on the ranks of one host");
  }
  options.train.data = "reference";
  if (options.strategy != "all") options.train.strategy = options.strategy;
  if (options.strategy == "all" && options.train.dtype == "bf16") options.train.strategy = "fsdp";  // one that has it
  auto train = options.train;
  if (options.params) {
    element_bytes(train.dtype, "adamw");  // throws its own errors for unknown names
    train.dtype = "float32";
  }
  train.complete();
  in_words_of_the_command_line([&] { make_hook(train.compress()); });
  if (options.strategy != "all") train.check_strategy(ranks, options.hosts);
  if (options.params) state_per_element(train.optimizer);
}

}  // namespace

void add_plan_command(CLI::App& app, Action& chosen) {
  auto* command = app.add_subcommand("plan", "estimate memory per rank and bytes per step without running a training");
  const auto options = std::make_shared<CommandOptions>();
  auto& train = options->train;
  auto* number = command->add_option_function<std::string>(
      "--params",
      [options](const std::string& text) {
        double count = 0;
        if (!CLI::detail::lexical_cast(text, count)) {
          throw UsageError(fmt::format("--params {}: give a number, such as 7e9", text));
        }
        options->params = count;
      },
      "number of parameters, such as 7e9; uses the published formulas");
  command->add_option("--model", train.model, "model: cnn, mlp, gpt; gives exact figures")
      ->excludes(number)
      ->capture_default_str();
  command->add_option("--size", train.size, "model size: tiny, small; gpt also large, gpt2")
      ->excludes(number)
      ->capture_default_str();
  command->add_option("--ranks", train.ranks, "default: 2");
  command
      ->add_option(
          "--hosts", options->hosts,
          "hosts of equally many ranks: hybrid has all shards on each; other strategies send between any two ranks")
      ->excludes(number)
      ->capture_default_str();
  command
      ->add_flag(
          "--elastic", options->elastic,
          "of an elastic job: under zero1, zero2, megatron and fsdp on several hosts, each shard has a second owner on "
          "another one")
      ->excludes(number);
  command->add_option("--strategy", options->strategy, fmt::format("strategy: {}", fmt::join(plannable(), ", ")))
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
    require_writable_file("--json", options->json);
    chosen = [options] { return options->params ? plan_number(*options) : plan_built_in(*options); };
  });
}

}  // namespace shoal::cli
