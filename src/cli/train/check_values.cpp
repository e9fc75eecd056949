#include "cli/train/check_values.h"

#include <fmt/format.h>

#include <charconv>
#include <cmath>
#include <limits>
#include <system_error>

#include "shoal/error.h"

namespace shoal::cli {
namespace {

template <class T>
bool fits(const std::string& text) {
  const auto* begin = text.data() + (text.starts_with('+') ? 1 : 0);
  T value{};
  const auto [end, error] = std::from_chars(begin, text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

// Shortens long texts, such as lines of 300 digits.
std::string shown(const std::string& text) {
  constexpr size_t most = 40;
  return text.size() > most ? fmt::format("{}... ({} characters)", text.substr(0, most / 2), text.size()) : text;
}

void check_number(const std::string& option, const std::string& type, const std::string& text) {
  if (type == "INT" && !fits<int64_t>(text)) {
    throw UsageError(fmt::format("{} {}: give a whole number of at most 18 digits", option, shown(text)));
  }
  if (type == "UINT" && !fits<uint64_t>(text)) {
    throw UsageError(fmt::format("{} {}: give a whole number from 0 to {}", option, shown(text),
                                 std::numeric_limits<uint64_t>::max()));
  }
  if (type != "FLOAT") return;
  constexpr size_t longest = 40;
  const double value = std::strtod(text.c_str(), nullptr);
  const bool overflows = std::isinf(value) && text.find_first_of("0123456789") != std::string::npos;
  if (std::isnan(value) || overflows || text.size() > longest) {
    throw UsageError(fmt::format("{} {}: give a number that a double holds", option, shown(text)));
  }
}

void check(const CLI::App& command) {
  for (const auto* option : command.get_options()) {
    if (option->get_positional() && option->get_lnames().empty()) continue;
    const auto name = option->get_name();
    for (const auto& text : option->results()) {
      const bool takes_a_value = option->get_items_expected_max() > 0;
      if (takes_a_value && text.starts_with("--") && command.get_option_no_throw(text) != nullptr) {
        throw UsageError(fmt::format("{}: give a value; found {} instead", name, text));
      }
      if (takes_a_value) check_number(name, option->get_type_name(), text);
    }
  }
}

}  // namespace

std::string unknown_option(const CLI::App& program, const std::vector<std::string>& line) {
  const CLI::App* command = &program;
  while (!command->get_subcommands().empty()) command = command->get_subcommands().front();
  for (size_t i = 1; i < line.size() && line[i] != "--"; ++i) {
    const auto name = line[i].substr(0, line[i].find('='));
    if (name.starts_with("--") && command->get_option_no_throw(name) == nullptr) return name;
  }
  return "";
}

void check_values(CLI::App& program) {
  for (auto* command : program.get_subcommands({})) {
    command->parse_complete_callback([command] { check(*command); });
    check_values(*command);
  }
}

}  // namespace shoal::cli
