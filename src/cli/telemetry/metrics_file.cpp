#include "cli/telemetry/metrics_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>
#include <string_view>
#include <utility>

#include "base/input_file.h"
#include "base/printable.h"
#include "base/strict_json.h"
#include "shoal/error.h"

namespace shoal::cli {
namespace {

constexpr size_t longest_line = 64 << 10;
constexpr size_t most_numbers = 64;
constexpr std::array<std::pair<std::string_view, double>, 3> not_numbers{
    {{"NaN", std::numeric_limits<double>::quiet_NaN()},
     {"Infinity", std::numeric_limits<double>::infinity()},
     {"-Infinity", -std::numeric_limits<double>::infinity()}}};
constexpr JsonLimits line_limits{.depth = 8, .bytes = int64_t{1} << 20, .text_bytes = longest_line};

// Python's json module writes NaN, Infinity and -Infinity, which are not JSON: puts them in quotes.
std::string with_quoted_words(std::string_view text) {
  std::string result;
  bool in_text = false, escaped = false;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '"' && !escaped) in_text = !in_text;
    escaped = in_text && text[i] == '\\' && !escaped;
    const auto word = in_text ? not_numbers.end()
                              : std::find_if(not_numbers.begin(), not_numbers.end(),
                                             [&](const auto& each) { return text.substr(i).starts_with(each.first); });
    if (word == not_numbers.end()) {
      result += text[i];
    } else {
      result += fmt::format("\"{}\"", word->first);
      i += word->first.size() - 1;
    }
  }
  return result;
}

// None: not a number.
std::optional<double> number_of(const nlohmann::json& value) {
  if (value.is_null()) return std::numeric_limits<double>::quiet_NaN();
  if (value.is_number()) return value.get<double>();
  if (!value.is_string()) return std::nullopt;
  const auto& text = value.get_ref<const std::string&>();
  const auto word =
      std::find_if(not_numbers.begin(), not_numbers.end(), [&](const auto& each) { return each.first == text; });
  return word == not_numbers.end() ? std::nullopt : std::optional(word->second);
}

MetricsLine parse_metrics_line(std::string_view text, const std::string& subject) {
  const auto refuse = [&](const std::string& what) { throw UsageError(fmt::format("{}: {}", subject, what)); };
  if (text.size() > longest_line) refuse(fmt::format("longer than {} bytes", longest_line));
  const auto json = parse_strict(with_quoted_words(text), line_limits, subject, refuse_as<UsageError>);
  if (!json.is_object()) refuse("not an object");
  const auto step = json.find("step");
  if (step == json.end()) refuse("no step");
  const bool whole = step->is_number_integer() &&
                     (!step->is_number_unsigned() || step->get<uint64_t>() <= std::numeric_limits<int64_t>::max());
  if (!whole) refuse("the step is no whole number");
  MetricsLine line{.step = step->get<int64_t>()};
  constexpr size_t longest_event = 1000;
  for (const auto& [name, value] : json.items()) {
    if (name == "event" && value.is_string()) {
      line.event = printable(value.get_ref<const std::string&>().substr(0, longest_event));
      continue;
    }
    const auto number = number_of(value);
    if (name == "step" || !number) continue;
    if (line.numbers.size() == most_numbers) refuse(fmt::format("more than {} numbers", most_numbers));
    line.numbers.emplace_back(printable(name), *number);
  }
  return line;
}

// Lines from `offset` on, the offset where each begins, and whether its end is there. What is longer than a line may be
// comes as its beginning.
template <class Each>
void read_lines(const InputFile& file, int64_t offset, const Each& each) {
  std::string piece(longest_line, '\0');
  std::string line;
  int64_t begin = offset;
  while (const auto size = file.read_some(piece.data(), static_cast<int64_t>(piece.size()), offset)) {
    std::string_view rest(piece.data(), static_cast<size_t>(size));
    for (auto end = rest.find('\n'); end != std::string_view::npos; end = rest.find('\n')) {
      line += rest.substr(0, end);
      rest.remove_prefix(end + 1);
      each(line, begin, /*has_end=*/true);
      begin = offset + size - static_cast<int64_t>(rest.size());
      line.clear();
    }
    offset += size;
    line += rest.substr(0, longest_line + 1 - std::min(line.size(), longest_line + 1));
  }
  if (!line.empty()) each(line, begin, /*has_end=*/false);
}

// Number of the line that begins at this offset, from 1.
int64_t line_number(const InputFile& file, int64_t offset) {
  std::string piece(longest_line, '\0');
  int64_t number = 1, done = 0;
  while (done < offset) {
    const auto size = file.read_some(piece.data(), std::min<int64_t>(piece.size(), offset - done), done);
    if (size == 0) break;
    number += std::count(piece.begin(), piece.begin() + size, '\n');
    done += size;
  }
  return number;
}

// Lines from `offset` on. is_part: the first is part of a line that began before.
DamagedLines read_from(const std::filesystem::path& path, const InputFile& file, int64_t offset, bool is_part,
                       const std::function<void(const MetricsLine& line)>& each) {
  DamagedLines damaged;
  bool any = false;
  read_lines(file, offset, [&](const std::string& text, int64_t begin, bool has_end) {
    const bool is_rest = std::exchange(is_part, false) && text.size() <= longest_line;
    if (is_rest || text.find_first_not_of(" \t\r") == std::string::npos) return;
    MetricsLine line;
    try {
      // The number of a line is needed for the first fault only.
      const bool is_first = damaged.count == 0;
      line = parse_metrics_line(text, is_first ? path.string() : "");
    } catch (const UsageError& error) {
      if (!has_end && text.size() <= longest_line) return;  // it is still being written
      if (damaged.count++ > 0) return;
      const auto fault = std::string(error.what()).substr(path.string().size());
      damaged.first = fmt::format("{}: line {}{}", path.string(), line_number(file, begin), fault);
      return;
    }
    any = true;
    each(line);
  });
  if (damaged.count > 0 && !any) throw UsageError(damaged.first);
  return damaged;
}

}  // namespace

std::optional<double> MetricsLine::find(const std::string& name) const {
  const auto found =
      std::find_if(numbers.begin(), numbers.end(), [&](const auto& entry) { return entry.first == name; });
  return found == numbers.end() ? std::nullopt : std::optional(found->second);
}

double MetricsLine::number(const std::string& name) const {
  return find(name).value_or(std::numeric_limits<double>::quiet_NaN());
}

nlohmann::ordered_json to_json(const MetricsLine& event) {
  nlohmann::ordered_json json{{"step", event.step}, {"event", event.event}};
  for (const auto& [name, value] : event.numbers) json[name] = value;
  return json;
}

std::string DamagedLines::in_words() const {
  if (count == 0) return "";
  return count == 1 ? first + "; the line is left out"
                    : fmt::format("{}; it and {} more are left out", first, count - 1);
}

DamagedLines read_metrics(const std::filesystem::path& path, const std::function<void(const MetricsLine& line)>& each) {
  const InputFile file(path, refuse_as<UsageError>);
  return read_from(path, file, 0, /*is_part=*/false, each);
}

LastMetrics last_metrics(const std::filesystem::path& path) {
  constexpr int64_t tail = 256 << 10;
  const InputFile file(path, refuse_as<UsageError>);
  const auto from = std::max<int64_t>(0, file.size() - tail);
  LastMetrics last;
  last.damaged =
      read_from(path, file, from, /*is_part=*/from > 0, [&](const MetricsLine& line) { last.lines.push_back(line); });
  return last;
}

}  // namespace shoal::cli
