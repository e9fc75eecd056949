#include "comm/telemetry/evidence.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>

#include "base/limits.h"
#include "base/printable.h"
#include "base/rank_list.h"

namespace shoal {

Evidence::Evidence(const std::vector<Flight>& flights) {
  for (const auto& flight : flights) flights_[flight.rank] = &flight;
  std::unordered_map<std::string, int64_t> of_hosts;
  for (const auto& [rank, flight] : flights_) {
    epochs_[rank] = of_hosts.try_emplace(flight->host, flight->epoch_ns).first->second;
  }
  Names incomplete;
  for (const auto& [rank, flight] : flights_) {
    if (!flight->lacks_groups) continue;
    for (const auto& group : flight->groups) incomplete[rank].insert(group.name);
  }
  std::map<std::string, GroupView> groups;
  for (const auto& flight : flights) {
    end_ = std::max(end_, time(flight.rank, flight.failed));
    for (const auto& group : flight.groups) view(groups, group, incomplete);
  }
  for (const auto& flight : flights) {
    for (const auto& record : flight.records) {
      end_ = std::max({end_, time(flight.rank, record.entered), time(flight.rank, record.finished)});
      if (record.kind != FlightRecord::collective || record.group < 0) continue;
      auto& group = groups.at(flight.groups[record.group].name);
      group.collectives[flight.rank][record.print.number] = &record;
      group.numbers.insert(record.print.number);
    }
  }
  for (auto& [name, group] : groups) {
    // Skips groups that compare calls before each operation; the operation itself says more.
    if (!name.ends_with("/checks")) groups_.push_back(std::move(group));
  }
}

void Evidence::view(std::map<std::string, GroupView>& groups, const Flight::Members& members,
                    const Names& incomplete) const {
  auto& group = groups[members.name];
  if (!group.ranks.empty()) return;
  group.name = members.name;
  for (const int rank : parse_rank_list(members.world_ranks, max_ranks)) {
    if (flights_.count(rank) == 0) continue;
    const auto known = incomplete.find(rank);
    if (known != incomplete.end() && !known->second.contains(members.name)) {
      group.unknown.push_back(rank);
      continue;
    }
    group.ranks.push_back(rank);
    group.collectives[rank];
  }
}

int64_t Evidence::time(int rank, int64_t own) const {
  if (own == 0) return 0;
  return own + epochs_.at(rank);
}

int64_t Evidence::first_entry(const GroupView& group, uint64_t number) const {
  int64_t first = std::numeric_limits<int64_t>::max();
  for (const int rank : group.ranks) {
    const auto* record = group.find(rank, number);
    if (record != nullptr) first = std::min(first, entered(rank, *record));
  }
  return first;
}

bool Evidence::in_job(int rank) const {
  const auto& flight = *flights_.at(rank);
  return flight.left == 0 && flight.state != ProcessState::gone;
}
bool Evidence::vanished(int rank) const {
  const auto& flight = *flights_.at(rank);
  return flight.left == 0 && flight.failed == 0 && flight.state == ProcessState::gone;
}
std::string Evidence::condition(int rank) const {
  const auto& flight = *flights_.at(rank);
  const auto pid = flight.process.pid;
  if (flight.state == ProcessState::stopped) return fmt::format("it (pid {}) is stopped by a signal", pid);
  if (in_job(rank)) return flight.state ? fmt::format("it (pid {}) runs", pid) : "it is on another host";
  if (flight.failed != 0) return "it has failed";
  if (flight.left != 0) return "it has left the job in order";
  return fmt::format("it (pid {}) is gone: killed, crashed or ended early", pid);
}

std::string rank_words(const std::vector<int>& ranks) {
  return fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "));
}

std::string of_group(const GroupView& group) {
  return group.name == "world" ? "" : fmt::format(" of group '{}'", printable(group.name));
}

}  // namespace shoal
