#include "base/rank_list.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <charconv>

namespace shoal {

std::string rank_list(const std::vector<int>& ranks) {
  std::vector<std::string> parts;
  for (size_t first = 0; first < ranks.size();) {
    size_t last = first;
    const int step = first + 1 < ranks.size() ? ranks[first + 1] - ranks[first] : 0;
    while (step > 0 && last + 1 < ranks.size() && ranks[last + 1] - ranks[last] == step) ++last;
    if (last < first + 2) last = first;  // two ranks are no range
    auto part = std::to_string(ranks[first]);
    if (last > first) part += fmt::format("-{}", ranks[last]);
    if (last > first && step > 1) part += fmt::format("/{}", step);
    parts.push_back(std::move(part));
    first = last + 1;
  }
  return fmt::format("{}", fmt::join(parts, ","));
}

std::vector<int> parse_rank_list(std::string_view text, int most) {
  std::vector<int> ranks;
  const auto* at = text.data();
  const auto* const end = at + text.size();
  const auto number = [&](int& value) {
    const auto read = std::from_chars(at, end, value);
    at = read.ptr;
    return read.ec == std::errc();
  };
  const auto skip = [&](char mark) { return at != end && *at == mark && ++at != nullptr; };
  while (at != end) {
    int first = 0;
    bool valid = number(first) && first >= 0;
    int last = first;
    int step = 1;
    if (valid && skip('-')) valid = number(last) && last >= first;
    if (valid && skip('/')) valid = number(step) && step > 0;
    valid = valid && (at == end || skip(',')) && (last - first) / step < most - static_cast<int>(ranks.size());
    if (!valid) {
      ranks.push_back(-1);
      return ranks;
    }
    for (int64_t rank = first; rank <= last; rank += step) ranks.push_back(static_cast<int>(rank));
  }
  return ranks;
}

}  // namespace shoal
