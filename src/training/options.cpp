#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>

#include "shoal/strategy.h"

namespace shoal {
namespace {

template <class T>
std::optional<T> parsed(const std::string& text) {
  T value{};
  const auto* begin = text.data() + (text.starts_with('+') ? 1 : 0);
  const auto [end, error] = std::from_chars(begin, text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

// Shortens long texts.
std::string shown(const std::string& text) {
  constexpr size_t most = 40;
  return text.size() > most ? fmt::format("{}... ({} characters)", text.substr(0, most / 2), text.size()) : text;
}

std::string wanted(const StrategyOption& option) {
  const auto at_least = option.minimum ? fmt::format("at least {:g}", *option.minimum) : "";
  switch (option.type) {
    case StrategyOption::Type::flag:
      return "true or false";
    case StrategyOption::Type::integer:
      return option.minimum ? at_least : "a whole number of at most 18 digits";
    case StrategyOption::Type::number:
      return option.minimum ? at_least : "a number that a double holds";
    case StrategyOption::Type::text:
      break;
  }
  return "";
}

bool fits(const StrategyOption& option, const std::string& text) {
  const double minimum = option.minimum.value_or(-std::numeric_limits<double>::infinity());
  switch (option.type) {
    case StrategyOption::Type::flag:
      return text == "true" || text == "false";
    case StrategyOption::Type::integer: {
      const auto value = parsed<int64_t>(text);
      return value && static_cast<double>(*value) >= minimum;
    }
    case StrategyOption::Type::number: {
      const auto value = parsed<double>(text);
      return value && std::isfinite(*value) && *value >= minimum;
    }
    case StrategyOption::Type::text:
      break;
  }
  return true;
}

void check_value(const StrategyOption& option, const std::string& text) {
  if (!fits(option, text)) {
    throw StrategyOptionError(option.name, fmt::format(" {}: give {}", shown(text), wanted(option)));
  }
  const auto& choices = option.choices;
  if (choices.empty() || std::find(choices.begin(), choices.end(), text) != choices.end()) return;
  throw StrategyOptionError(
      option.name, fmt::format(" {}: not in this version; available: {}", shown(text), fmt::join(choices, ", ")));
}

}  // namespace

OptionValues::OptionValues(const std::vector<StrategyOption>& known, const StrategyOptions& given) : given_(given) {
  for (const auto& option : known) {
    const auto found = given.find(option.name);
    if (found != given.end()) check_value(option, found->second);
    values_[option.name] = found != given.end() ? found->second : option.default_value;
  }
}

const std::string& OptionValues::text(const std::string& name) const {
  return values_.at(name);
}

int64_t OptionValues::integer(const std::string& name) const {
  return parsed<int64_t>(text(name)).value();
}

int OptionValues::count(const std::string& name) const {
  constexpr auto most = std::numeric_limits<int>::max();
  const auto value = integer(name);
  if (value <= most && value >= -most) return static_cast<int>(value);
  throw StrategyOptionError(name, fmt::format(" {}: give at most {}", value, most));
}

double OptionValues::number(const std::string& name) const {
  return parsed<double>(text(name)).value();
}

}  // namespace shoal
