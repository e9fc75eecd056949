#include "cli/telemetry/lateness.h"

#include <algorithm>
#include <chrono>
#include <map>

#include "comm/telemetry/evidence.h"
#include "comm/telemetry/verdict.h"

namespace shoal::cli {
namespace {

struct Delay {
  double milliseconds = 0;
  int64_t operations = 0;
};

// Ranks enter the operations of a group in one order; those of the last 1024 that all of them have entered count.
std::map<int, Delay> delays(const Evidence& evidence) {
  std::map<int, Delay> by_rank;
  for (const auto& group : evidence.groups()) {
    if (group.ranks.size() < 2) continue;
    for (const auto& [number, unused] : group.collectives.at(group.ranks.front())) {
      const bool everywhere = std::all_of(group.ranks.begin(), group.ranks.end(),
                                          [&, n = number](int rank) { return group.find(rank, n) != nullptr; });
      if (!everywhere) continue;
      const auto first = evidence.first_entry(group, number);
      for (const int rank : group.ranks) {
        auto& delay = by_rank[rank];
        delay.milliseconds += 1e-6 * static_cast<double>(evidence.entered(rank, *group.find(rank, number)) - first);
        ++delay.operations;
      }
    }
  }
  return by_rank;
}

}  // namespace

std::string state_in_words(const Flight& flight) {
  if (flight.failed != 0) return "failed";
  if (flight.left != 0) return "left in order";
  if (!flight.state) return "on another host";
  switch (*flight.state) {
    case ProcessState::running:
      return "running";
    case ProcessState::stopped:
      return "stopped";
    default:
      return "gone";
  }
}

std::vector<RankView> rank_views(const std::vector<Flight>& flights) {
  using std::chrono::nanoseconds;
  const auto now = std::chrono::duration_cast<nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
  const auto late = delays(Evidence(flights));
  std::vector<RankView> views;
  for (const auto& flight : flights) {
    RankView view{.rank = flight.rank, .state = state_in_words(flight)};
    for (const auto& record : flight.records) {
      if (record.kind != FlightRecord::note) view.step = std::max(view.step, record.print.step);
    }
    const auto last = std::find_if(flight.records.rbegin(), flight.records.rend(),
                                   [](const auto& record) { return record.kind != FlightRecord::note; });
    if (last != flight.records.rend()) {
      view.operation = describe(*last);
      const bool open = last->finished == 0 && view.state == "running";
      // It runs on this host, whose steady clock its times are of; the other clock may have been set since.
      if (open) view.waiting_s = std::max(0.0, 1e-9 * static_cast<double>(now - last->entered));
    }
    if (const auto found = late.find(flight.rank); found != late.end() && found->second.operations > 0) {
      view.late_ms = found->second.milliseconds / static_cast<double>(found->second.operations);
    }
    views.push_back(std::move(view));
  }
  return views;
}

}  // namespace shoal::cli
