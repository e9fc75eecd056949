// Detection of ranks that have called different things.

#include "comm/telemetry/evidence.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>

#include "comm/telemetry/verdict.h"

namespace shoal {
namespace {

// What `odd` did at `number` that `usual` did not, if the following operation shows it.
std::string explain(const GroupView& group, uint64_t number, int usual, int odd) {
  const auto alike = [&](uint64_t of_usual, uint64_t of_odd) {
    const auto* a = group.find(usual, of_usual);
    const auto* b = group.find(odd, of_odd);
    if (a == nullptr || b == nullptr) return false;
    auto print = a->print;
    print.number = b->print.number;
    return same(print, b->print);
  };
  const bool skipped = alike(number + 1, number);
  const bool added = alike(number, number + 1);
  if (skipped && added) return fmt::format("rank {} called these two in another order", odd);
  if (skipped) return fmt::format("rank {} left the first out", odd);
  if (added) return fmt::format("rank {} called its own in addition", odd);
  return "";
}

}  // namespace

void find_differences(const Evidence& evidence, const GroupView& group, Findings& findings) {
  std::set<uint64_t> numbers;
  for (const auto& [rank, own] : group.collectives) {
    for (const auto& [number, record] : own) numbers.insert(number);
  }
  for (const auto number : numbers) {
    std::vector<std::vector<int>> camps;  // ranks that made the same call
    for (const int rank : group.ranks) {
      const auto* record = group.find(rank, number);
      if (record == nullptr) continue;
      const auto camp = std::find_if(camps.begin(), camps.end(), [&](const std::vector<int>& ranks) {
        return same(group.find(ranks[0], number)->print, record->print);
      });
      camp == camps.end() ? camps.push_back({rank}) : camp->push_back(rank);
    }
    if (camps.size() < 2) continue;
    std::stable_sort(camps.begin(), camps.end(), [](const auto& a, const auto& b) { return a.size() > b.size(); });
    std::vector<std::string> calls;
    for (const auto& ranks : camps) {
      calls.push_back(fmt::format("{} called {}", rank_words(ranks), describe(group.find(ranks[0], number)->print)));
    }
    auto text = fmt::format("ranks called different operations as #{}{}: {}", number - 1, of_group(group),
                            fmt::join(calls, ", "));
    const auto how = explain(group, number, camps[0][0], camps[1][0]);
    if (!how.empty()) text += "; " + how;
    findings.push_back({Finding::differs, evidence.entered(camps[1][0], *group.find(camps[1][0], number)), text});
    return;  // later differences follow from this one
  }
}

}  // namespace shoal
