#include "cli/launch/elastic_range.h"

#include <fmt/format.h>

#include <charconv>
#include <system_error>

#include "shoal/error.h"

namespace shoal::cli {
namespace {

int to_count(const std::string& text, const std::string& whole) {
  int count = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), count);
  if (error != std::errc() || end != text.data() + text.size()) {
    throw UsageError(fmt::format("--elastic {}: give MIN or MIN:MAX, numbers of ranks", whole));
  }
  if (count < 1) throw UsageError(fmt::format("--elastic {}: give at least 1 rank", whole));
  return count;
}

}  // namespace

ElasticRange elastic_range(const std::string& text) {
  const auto colon = text.find(':');
  ElasticRange range{.least = to_count(text.substr(0, colon), text)};
  if (colon != std::string::npos) range.most = to_count(text.substr(colon + 1), text);
  return range;
}

}  // namespace shoal::cli
