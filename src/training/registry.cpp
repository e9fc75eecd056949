#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <list>

#include "module/walk.h"
#include "shoal/training.h"
#include "training/builtin.h"
#include "training/parts.h"

namespace shoal {
namespace {

// A list, because trainings refer to their strategies, and more may be registered later.
std::list<Strategy>& registry() {
  static std::list<Strategy> all = [] {
    std::list<Strategy> list;
    for (const auto& group :
         {ddp_strategies, zero_strategies, megatron_strategies, fsdp_strategies, local_update_strategies,
          decentralized_strategies, hybrid_gossip_strategies, strategies_without_exchange}) {
      for (auto& strategy : group()) {
        strategy.takes_clip_grad = strategy.takes_scaler = true;
        list.push_back(std::move(strategy));
      }
    }
    return list;
  }();
  return all;
}

const Strategy* found(const std::string& name) {
  for (const auto& strategy : registry()) {
    if (strategy.name == name) return &strategy;
  }
  return nullptr;
}

// Options of the same name have the same type in all strategies, so that the command line can have one for all.
void check_type(const Strategy& newcomer, const StrategyOption& option) {
  for (const auto& strategy : registry()) {
    for (const auto& other : strategy.options) {
      if (other.name != option.name || other.type == option.type) continue;
      throw UsageError(fmt::format("register_strategy {}: option {} has another type in {}; give it another name",
                                   newcomer.name, option.name, strategy.name));
    }
  }
}

// Refuses arguments that would have no effect, and missing ones.
void check_arguments(const Strategy& strategy, const OptimizerRecipe& recipe, const TrainingOptions& options) {
  const auto refuse = [&](const std::string& fault) {
    throw UsageError(fmt::format("make_training {}: {}", strategy.name, fault));
  };
  if (!recipe.make || !recipe.defaults) refuse("the recipe lacks `make` or `defaults`; take optimizer_recipe()");
  if (options.schedule && !strategy.takes_schedule) {
    refuse("the strategy takes no schedule; make one of optimizer(), and step it after step()");
  }
  if (options.clip_grad > 0 && !strategy.takes_clip_grad) {
    refuse("the strategy does not clip (Strategy::takes_clip_grad), so that clip_grad has no effect");
  }
  if (options.precision.scaler && !strategy.takes_scaler) {
    refuse("the strategy has no loss scaler (Strategy::takes_scaler), so that precision.scaler has no effect");
  }
  if (!options.communication_hook) return;
  if (!strategy.has("compress")) refuse("the strategy reduces no gradients, so that communication_hook has no effect");
  if (options.options.contains("compress")) refuse("communication_hook and the option compress exclude each other");
}

// Elsewhere bf16 is the name of what is bf16_mixed here.
[[noreturn]] void refuse_bf16(const std::string& strategy) {
  std::vector<std::string> keeping;
  for (const auto& other : registry()) {
    if (other.main_copies) keeping.push_back(other.name);
  }
  throw UsageError(
      fmt::format("bf16: strategy {} keeps no float32 copies of bfloat16 parameters, which lose small updates; take "
                  "bf16_mixed, a strategy with float32 copies ({}), or bf16_pure for bfloat16 alone",
                  strategy, fmt::join(keeping, ", ")));
}

}  // namespace

bool Strategy::has(const std::string& option) const {
  return std::any_of(options.begin(), options.end(), [&](const StrategyOption& own) { return own.name == option; });
}

std::vector<std::string> strategy_names() {
  std::vector<std::string> names;
  for (const auto& strategy : registry()) names.push_back(strategy.name);
  return names;
}

std::vector<std::string> elastic_strategies() {
  std::vector<std::string> names;
  for (const auto& strategy : registry()) {
    if (strategy.elastic) names.push_back(strategy.name);
  }
  return names;
}

const Strategy& find_strategy(const std::string& name) {
  if (const auto* strategy = found(name)) return *strategy;
  throw UsageError(fmt::format("unknown strategy '{}'; choose from {}", name, fmt::join(strategy_names(), ", ")));
}

void register_strategy(Strategy strategy) {
  if (strategy.name.empty()) throw UsageError("register_strategy: give the strategy a name");
  if (found(strategy.name) != nullptr) {
    throw UsageError(fmt::format("register_strategy {}: there is one of this name; take another", strategy.name));
  }
  if (!strategy.make) throw UsageError(fmt::format("register_strategy {}: give it a `make`", strategy.name));
  for (const auto& option : strategy.options) check_type(strategy, option);
  registry().push_back(std::move(strategy));
}

std::vector<std::string> strategies_with(const std::string& option) {
  std::vector<std::string> names;
  for (const auto& strategy : registry()) {
    if (strategy.has(option)) names.push_back(strategy.name);
  }
  return names;
}

OptionValues option_values(const Strategy& strategy, const StrategyOptions& options) {
  for (const auto& [name, value] : options) {
    if (strategy.has(name)) continue;
    const auto others = strategies_with(name);
    throw StrategyOptionError(name, others.empty() ? fmt::format(": no strategy has it")
                                                   : fmt::format(": {} does not have it; it is for {}", strategy.name,
                                                                 fmt::join(others, ", ")));
  }
  return {strategy.options, options};
}

std::vector<std::string> precision_names() {
  return {"float32", "bf16_mixed", "fp16_mixed", "bf16", "bf16_pure", "float64"};
}

std::vector<std::string> precision_names(const std::string& strategy) {
  auto names = precision_names();
  std::erase(names, find_strategy(strategy).main_copies ? "bf16_pure" : "bf16");
  return names;
}

Precision precision_of(const std::string& strategy, const std::string& name) {
  const bool main_copies = find_strategy(strategy).main_copies;
  if (name == "bf16" && !main_copies) refuse_bf16(strategy);
  if (name == "bf16_pure" && main_copies) {
    throw UsageError(fmt::format("bf16_pure: strategy {} keeps float32 copies of the parameters; take bf16", strategy));
  }
  if (name == "float32") return Precision::float32();
  if (name == "float64") return Precision::float64();
  if (name == "bf16" || name == "bf16_pure") return Precision::bf16();
  if (name == "bf16_mixed") return main_copies ? Precision::bf16() : Precision::bf16_mixed();
  if (name == "fp16_mixed") return main_copies ? Precision::fp16() : Precision::fp16_mixed();
  throw UsageError(fmt::format("unknown precision '{}'; choose from {}", name, fmt::join(precision_names(), ", ")));
}

TrainingParts checked_parts(const std::string& strategy, std::shared_ptr<torch::nn::Module> module,
                            OptimizerRecipe recipe, const Group& group, const TrainingOptions& options) {
  const auto& chosen = find_strategy(strategy);
  check_arguments(chosen, recipe, options);
  auto values = option_values(chosen, options.options);
  if (chosen.check) chosen.check(values, options, group.size(), std::nullopt);
  if (!module) throw UsageError(fmt::format("make_training {}: the module is nullptr", strategy));
  walk(*module, options.ignored);  // also for strategies without a wrapper that would refuse unknown names
  return {.strategy = chosen,
          .module = std::move(module),
          .recipe = std::move(recipe),
          .group = group,
          .options = options,
          .values = std::move(values)};
}

std::unique_ptr<TrainingCore> make_training_core(const std::string& strategy, std::shared_ptr<torch::nn::Module> module,
                                                 OptimizerRecipe recipe, const Group& group,
                                                 const TrainingOptions& options) {
  const auto& chosen = find_strategy(strategy);
  return chosen.make(checked_parts(strategy, std::move(module), std::move(recipe), group, options));
}

}  // namespace shoal
