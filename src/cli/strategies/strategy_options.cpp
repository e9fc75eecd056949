#include "cli/strategies/strategy_options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <vector>

#include "shoal/strategy.h"

namespace shoal::cli {
namespace {

using Names = std::vector<std::string>;

// Options of one name, as the strategies describe them.
struct Offer {
  StrategyOption option;
  struct Text {
    std::string help;
    std::string usual;
    Names strategies;
  };
  std::vector<Text> texts;
};

std::string help_of(const StrategyOption& option) {
  return option.choices.empty() ? option.help : fmt::format("{}: {}", option.help, fmt::join(option.choices, ", "));
}

std::vector<Offer> offers() {
  std::vector<Offer> all;
  for (const auto& name : strategy_names()) {
    for (const auto& option : find_strategy(name).options) {
      auto offer = std::find_if(all.begin(), all.end(), [&](const Offer& o) { return o.option.name == option.name; });
      if (offer == all.end()) offer = all.insert(all.end(), Offer{option, {}});
      auto& texts = offer->texts;
      const auto same = std::find_if(texts.begin(), texts.end(), [&](const Offer::Text& text) {
        return text.help == help_of(option) && text.usual == option.default_value;
      });
      if (same == texts.end()) {
        texts.push_back({help_of(option), option.default_value, {name}});
      } else {
        same->strategies.push_back(name);
      }
    }
  }
  return all;
}

bool same_default(const Offer& offer) {
  const auto& texts = offer.texts;
  return std::all_of(texts.begin(), texts.end(), [&](const auto& text) { return text.usual == texts.front().usual; });
}

// See TrainOptions::training_options().
std::string with_mixed_dtypes(const Offer& offer) {
  Names wide;
  for (const auto& text : offer.texts) {
    if (text.usual == "true") continue;
    std::copy_if(text.strategies.begin(), text.strategies.end(), std::back_inserter(wide),
                 [](const auto& name) { return find_strategy(name).main_copies; });
  }
  return fmt::format("{}: true by default with --dtype bf16_mixed and fp16_mixed", fmt::join(wide, ", "));
}

std::string help_of(const Offer& offer) {
  Names parts;
  for (const auto& text : offer.texts) {
    parts.push_back(fmt::format("{}: {}{}", fmt::join(text.strategies, ", "), text.help,
                                same_default(offer) ? "" : fmt::format(" (default: {})", text.usual)));
  }
  if (offer.option.name == "grad_reduce_in_fp32") parts.push_back(with_mixed_dtypes(offer));
  return fmt::format("{}", fmt::join(parts, "; "));
}

// Converts bucket_cap_mb to --bucket-cap-mb.
std::string spelled(std::string name) {
  std::replace(name.begin(), name.end(), '_', '-');
  return "--" + name;
}

void add(CLI::App& command, const Offer& offer, StrategyOptions& values) {
  const auto& option = offer.option;
  const auto flag = spelled(option.name);
  const auto help = help_of(offer);
  if (option.type == StrategyOption::Type::flag) {
    const auto set = [&values, name = option.name](int64_t count) { values[name] = count > 0 ? "true" : "false"; };
    command.add_flag_function(flag, set, help);
    return;
  }
  const auto set = [&values, name = option.name, implicit = option.implicit_value](const std::string& text) {
    values[name] = text.empty() ? implicit : text;
  };
  auto* added = command.add_option_function<std::string>(flag, set, help);
  if (option.type == StrategyOption::Type::integer) added->type_name("INT");
  if (option.type == StrategyOption::Type::number) added->type_name("FLOAT");
  if (!option.implicit_value.empty()) {
    added->expected(0, 1)->default_str(option.implicit_value);
  } else if (same_default(offer)) {
    added->default_str(option.default_value);
  }
}

}  // namespace

void add_strategy_options(CLI::App& command, StrategyOptions& values) {
  for (const auto& offer : offers()) add(command, offer, values);
}

std::string list_of_strategies() {
  std::string text = "Strategies:\n";
  for (const auto& name : strategy_names()) text += fmt::format("  {:<16}{}\n", name, find_strategy(name).help);
  return text;
}

void in_words_of_the_command_line(const std::function<void()>& work) {
  try {
    work();
  } catch (const StrategyOptionError& error) {
    throw UsageError(spelled(error.option()) + error.fault());
  }
}

void check_logging_data(const TrainOptions& options) {
  if (!options.logging_data || find_strategy(options.strategy).logging_data) return;
  Names others;
  for (const auto& name : strategy_names()) {
    if (find_strategy(name).logging_data) others.push_back(name);
  }
  throw UsageError(
      fmt::format("--logging-data: {} does not have it; it is for {}", options.strategy, fmt::join(others, ", ")));
}

}  // namespace shoal::cli
