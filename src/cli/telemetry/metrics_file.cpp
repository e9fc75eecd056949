#include "cli/telemetry/metrics_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <string_view>

#include "base/input_file.h"
#include "base/printable.h"
#include "base/strict_json.h"
#include "shoal/error.h"

namespace shoal::cli {
namespace {

constexpr size_t longest_line = 64 << 10;
constexpr size_t most_numbers = 64;
constexpr JsonLimits line_limits{.depth = 8, .bytes = int64_t{1} << 20, .text_bytes = longest_line};

MetricsLine parse_metrics_line(std::string_view text, const std::string& subject) {
  const auto refuse = [&](const std::string& what) { throw UsageError(fmt::format("{}: {}", subject, what)); };
  const auto json = parse_strict(text, line_limits, subject, refuse_as<UsageError>);
  if (!json.is_object()) refuse("not an object");
  const auto step = json.find("step");
  if (step == json.end()) refuse("no step");
  const bool whole = step->is_number_integer() &&
                     (!step->is_number_unsigned() || step->get<uint64_t>() <= std::numeric_limits<int64_t>::max());
  if (!whole) refuse("the step is no whole number");
  MetricsLine line{.step = step->get<int64_t>()};
  for (const auto& [name, value] : json.items()) {
    if (name == "step" || !(value.is_number() || value.is_null())) continue;
    if (line.numbers.size() == most_numbers) refuse(fmt::format("more than {} numbers", most_numbers));
    line.numbers.emplace_back(printable(name.substr(0, 64)),
                              value.is_null() ? std::numeric_limits<double>::quiet_NaN() : value.get<double>());
  }
  return line;
}

// Complete lines from `offset` on. where: words for a line, given its number among these and its offset.
template <class Where, class Each>
void read_lines(const InputFile& file, int64_t offset, const Where& where, const Each& each) {
  std::string piece(longest_line, '\0');
  std::string line;
  int64_t number = 0, begin = offset;
  while (const auto size = file.read_some(piece.data(), static_cast<int64_t>(piece.size()), offset)) {
    offset += size;
    std::string_view rest(piece.data(), static_cast<size_t>(size));
    for (auto end = rest.find('\n'); end != std::string_view::npos; end = rest.find('\n')) {
      line += rest.substr(0, end);
      rest.remove_prefix(end + 1);
      each(line, where(number++, begin));
      begin += static_cast<int64_t>(line.size()) + 1;
      line.clear();
    }
    line += rest;
    if (line.size() > longest_line) {
      throw UsageError(fmt::format("{}: longer than {} bytes", where(number, begin), longest_line));
    }
  }
}

bool is_empty(std::string_view line) {
  return line.find_first_not_of(" \t\r") == std::string_view::npos;
}

}  // namespace

double MetricsLine::number(const std::string& name) const {
  const auto found =
      std::find_if(numbers.begin(), numbers.end(), [&](const auto& entry) { return entry.first == name; });
  return found == numbers.end() ? std::numeric_limits<double>::quiet_NaN() : found->second;
}

void read_metrics(const std::filesystem::path& path, const std::function<void(const MetricsLine& line)>& each) {
  const InputFile file(path, refuse_as<UsageError>);
  const auto where = [&](int64_t number, int64_t) { return fmt::format("{}: line {}", path.string(), number + 1); };
  read_lines(file, 0, where, [&](const std::string& line, const std::string& subject) {
    if (!is_empty(line)) each(parse_metrics_line(line, subject));
  });
}

std::vector<MetricsLine> last_metrics(const std::filesystem::path& path) {
  constexpr int64_t tail = 256 << 10;
  const InputFile file(path, refuse_as<UsageError>);
  const auto from = std::max<int64_t>(0, file.size() - tail);
  std::vector<MetricsLine> lines;
  const auto where = [&](int64_t, int64_t begin) {
    return fmt::format("{}: the line from byte {} on", path.string(), begin);
  };
  bool is_part = from > 0;  // of a line that began before
  read_lines(file, from, where, [&](const std::string& line, const std::string& subject) {
    if (!std::exchange(is_part, false) && !is_empty(line)) lines.push_back(parse_metrics_line(line, subject));
  });
  return lines;
}

}  // namespace shoal::cli
