// Detection of ranks that wait, and of the ranks that they wait for.

#include "comm/telemetry/evidence.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "comm/telemetry/verdict.h"

namespace shoal {
namespace {

std::string seconds(int64_t nanoseconds) {
  return fmt::format("{:.1f} s", 1e-9 * double(nanoseconds));
}

std::string last_words(const GroupView& group, int rank) {
  const auto number = group.last(rank);
  if (number == 0) return "it has entered none there";
  const auto& record = *group.find(rank, number);
  return fmt::format("its last there is {}, {}finished", describe(record), record.finished == 0 ? "not " : "");
}

bool waits_elsewhere(const Evidence& evidence, int rank, const GroupView& here) {
  return std::any_of(evidence.groups().begin(), evidence.groups().end(), [&](const GroupView& group) {
    if (group.name == here.name || group.collectives.count(rank) == 0) return false;
    const auto& own = group.collectives.at(rank);
    return std::any_of(own.begin(), own.end(), [](const auto& entry) { return entry.second->finished == 0; });
  });
}

bool blame_those_gone(const Evidence& evidence, const GroupView& group, uint64_t number,
                      const std::vector<int>& waiting, Findings& findings) {
  bool found = false;
  for (const int rank : waiting) {
    const auto& record = *group.find(rank, number);
    if (!evidence.vanished(rank) && evidence.flights().at(rank)->state != ProcessState::stopped) continue;
    found = true;
    findings.push_back({Finding::missing, evidence.first_entry(group, number),
                        fmt::format("rank {} entered {}{} and did not finish it: {}", rank, describe(record),
                                    of_group(group), evidence.condition(rank))});
  }
  return found;
}

bool blame_the_late(const Evidence& evidence, const GroupView& group, uint64_t number, Findings& findings) {
  for (const int other : group.ranks) {
    const auto gave_up = evidence.time(other, evidence.flights().at(other)->failed);
    if (gave_up == 0) continue;
    for (const int rank : group.ranks) {
      const auto& record = *group.find(rank, number);
      if (evidence.entered(rank, record) <= gave_up) continue;
      const auto& theirs = *group.find(other, number);
      findings.push_back(
          {Finding::late, gave_up,
           fmt::format("rank {} entered {}{} {} later than rank {}, which had given up by then", rank, describe(record),
                       of_group(group), seconds(evidence.entered(rank, record) - evidence.entered(other, theirs)),
                       other)});
      return true;
    }
  }
  return false;
}

}  // namespace

void find_missing(const Evidence& evidence, const GroupView& group, Findings& findings) {
  std::map<uint64_t, std::vector<int>> behind;
  for (const int rank : group.ranks) {
    const auto next = group.last(rank) + 1;
    if (group.has(next)) behind[next].push_back(rank);
  }
  for (const auto& [number, ranks] : behind) {
    std::vector<int> waiting;
    const Flight::Record* call = nullptr;
    for (const int rank : group.ranks) {
      const auto* record = group.find(rank, number);
      if (record == nullptr) continue;
      call = record;
      if (record->finished == 0) waiting.push_back(rank);
    }
    const auto since = evidence.first_entry(group, number);
    for (const int rank : ranks) {
      if (waiting.empty() && evidence.in_job(rank)) continue;  // it is expected to come
      std::string text =
          fmt::format("rank {} {} entered {}{}: {}; {}", rank, evidence.in_job(rank) ? "has not" : "never",
                      describe(*call), of_group(group), evidence.condition(rank), last_words(group, rank));
      if (!waiting.empty()) {
        text += fmt::format("; {} waited for it, {} to the end of the record", rank_words(waiting),
                            seconds(evidence.end() - since));
      }
      // A rank that was told of a failure, or that waits in another group, is not the cause.
      const bool follows = evidence.flights().at(rank)->failed != 0 || waits_elsewhere(evidence, rank, group);
      findings.push_back({follows ? Finding::under_way : Finding::missing, since, text});
    }
  }
}

void find_unfinished(const Evidence& evidence, const GroupView& group, Findings& findings) {
  for (const auto& [number, unused] :
       group.collectives.empty() ? std::map<uint64_t, const Flight::Record*>() : group.collectives.begin()->second) {
    std::vector<int> waiting;
    bool all = true;
    for (const int rank : group.ranks) {
      const auto* record = group.find(rank, number);
      all = all && record != nullptr;
      if (record != nullptr && record->finished == 0) waiting.push_back(rank);
    }
    if (!all || waiting.empty()) continue;
    if (!blame_those_gone(evidence, group, number, waiting, findings) &&
        !blame_the_late(evidence, group, number, findings)) {
      const auto& record = *group.find(waiting[0], number);
      const auto who = rank_words(waiting) + (waiting.size() == 1 ? " has" : " have");
      const auto what = describe(record) + of_group(group);
      findings.push_back(
          {Finding::under_way, evidence.entered(waiting[0], record),
           group.unknown.empty()
               ? fmt::format(
                     "all ranks have entered {}, and {} not finished it: its data are under way, or a rank does "
                     "not wait for it",
                     what, who)
               : fmt::format("{} not finished {}; what {} did there is unknown: the flight recorder had no room for "
                             "all groups",
                             who, what, rank_words(group.unknown))});
    }
    return;
  }
}

void find_other_waits(const Evidence& evidence, Findings& findings) {
  for (const auto& [rank, flight] : evidence.flights()) {
    for (const auto& record : flight->records) {
      const bool message = record.kind == FlightRecord::message;
      const bool of_no_group = record.kind == FlightRecord::collective && record.group < 0;
      if (record.finished != 0 || (!message && !of_no_group && record.kind != FlightRecord::wait)) continue;
      findings.push_back({Finding::unheard, evidence.entered(rank, record),
                          fmt::format("rank {} has not finished {}{}", rank, describe(record),
                                      message       ? fmt::format(", with rank {} of its group", record.peer)
                                      : of_no_group ? ", of a group that the flight recorder had no room for: for whom "
                                                      "it waits is unknown"
                                                    : "")});
      break;
    }
  }
}

}  // namespace shoal
