#include "cli/train/check_values.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
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

// Letters to add, drop, change or swap with the next one.
size_t distance(const std::string& a, const std::string& b) {
  std::vector<std::vector<size_t>> table(a.size() + 1, std::vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) {
    for (size_t j = 0; j <= b.size(); ++j) {
      auto& here = table[i][j];
      if (i == 0 || j == 0) {
        here = i + j;
        continue;
      }
      here = std::min({table[i - 1][j] + 1, table[i][j - 1] + 1, table[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
      const bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (swapped) here = std::min(here, table[i - 2][j - 2] + 1);
    }
  }
  return table[a.size()][b.size()];
}

// "; did you mean --model?", for the closest of the names; empty: none is close.
std::string or_else(const std::string& word, const std::vector<std::string>& names) {
  constexpr size_t longest = 60;
  if (word.size() > longest || names.empty()) return "";
  const auto closest = std::min_element(
      names.begin(), names.end(), [&](const auto& a, const auto& b) { return distance(word, a) < distance(word, b); });
  return distance(word, *closest) <= 2 ? fmt::format("; did you mean {}?", *closest) : "";
}

void check(const CLI::App& command) {
  for (const auto* option : command.get_options()) {
    const auto name = option->get_name();
    for (const auto& text : option->results()) {
      const bool takes_a_value = option->get_items_expected_max() > 0;
      // The shell makes it of a variable that is not set; it would be taken for an option that is not given. An option
      // that may stand alone has its default then.
      if (takes_a_value && text.empty()) throw UsageError(fmt::format("{}: give a value; it is empty", name));
      if (!option->nonpositional()) continue;
      if (takes_a_value && text.starts_with("--") && command.get_option_no_throw(text) != nullptr) {
        throw UsageError(fmt::format("{}: give a value; found {} instead", name, text));
      }
      if (takes_a_value) check_number(name, option->get_type_name(), text);
    }
  }
}

// As CLI11 reads them, but numbers, which would be counts.
bool is_flag_value(std::string text) {
  const std::vector<std::string> values{"true", "false", "yes", "no", "on", "off", "1", "0"};
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::tolower(c); });
  return std::find(values.begin(), values.end(), text) != values.end();
}

// CLI11 converts a flag's value before a command is complete, and lets the converter's exceptions pass.
void check_flags_of(CLI::App& command) {
  for (auto* option : command.get_options()) {
    if (option->get_items_expected_max() > 0) continue;
    option->check([name = option->get_name()](const std::string& text) -> std::string {
      if (!is_flag_value(text)) throw UsageError(fmt::format("{}={}: give true or false", name, shown(text)));
      return "";
    });
  }
}

}  // namespace

std::string unknown_word(const CLI::App& program, const std::vector<std::string>& line) {
  const CLI::App* command = &program;
  std::string path;  // of the command, with a space behind it
  size_t next = 1;   // word of the line behind it
  while (!command->get_subcommands().empty()) {
    command = command->get_subcommands().front();
    path += command->get_name() + " ";
    ++next;
  }
  std::vector<std::string> commands;
  for (const auto* one : command->get_subcommands([](const CLI::App*) { return true; }))
    commands.push_back(one->get_name());
  if (!commands.empty() && line.size() > next && !line[next].starts_with('-')) {
    const auto& word = line[next];
    if (std::find(commands.begin(), commands.end(), word) != commands.end()) return "";
    const auto meant = or_else(word, commands);
    const auto list = meant.empty() ? fmt::format("; there are {}", fmt::join(commands, ", ")) : meant;
    return fmt::format("there is no command {}{}{}", path, shown(word), list);
  }
  for (size_t i = 1; i < line.size() && line[i] != "--"; ++i) {
    const auto name = line[i].substr(0, line[i].find('='));
    if (!name.starts_with("--") || command->get_option_no_throw(name) != nullptr) continue;
    std::vector<std::string> names;
    for (const auto* option : command->get_options()) {
      for (const auto& own : option->get_lnames()) names.push_back("--" + own);
    }
    return "there is no option " + name + or_else(name, names);
  }
  return "";
}

void refuse_values_left_out(const std::vector<std::string>& line) {
  for (const auto& word : line) {
    if (!word.starts_with("--") || !word.ends_with('=')) continue;
    throw UsageError(fmt::format("{}: give a value; it is empty", word.substr(0, word.size() - 1)));
  }
}

void check_values(CLI::App& program) {
  for (auto* command : program.get_subcommands({})) {
    check_flags_of(*command);
    command->parse_complete_callback([command] { check(*command); });
    check_values(*command);
  }
}

}  // namespace shoal::cli
