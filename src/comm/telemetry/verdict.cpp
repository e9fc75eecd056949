#include "comm/telemetry/verdict.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/printable.h"
#include "comm/telemetry/evidence.h"

namespace shoal {
namespace {

void find_ranks_without_record(const Evidence& evidence, Findings& findings) {
  const int size = evidence.flights().begin()->second->size;
  std::vector<int> ranks;
  for (int rank = 0; rank < size; ++rank) {
    if (evidence.flights().count(rank) == 0) ranks.push_back(rank);
  }
  if (ranks.empty()) return;
  findings.push_back(
      {Finding::absent, 0,
       fmt::format("{} of {}: no record here; on another host, or never started", rank_words(ranks), size)});
}

void find_ends(const Evidence& evidence, Findings& findings) {
  for (const auto& [rank, flight] : evidence.flights()) {
    if (evidence.vanished(rank)) {
      findings.push_back({Finding::remark, evidence.end(), fmt::format("rank {}: {}", rank, evidence.condition(rank))});
    }
    if (flight->failed != 0) {
      findings.push_back({Finding::remark, evidence.time(rank, flight->failed),
                          fmt::format("rank {} failed: {}", rank, flight->failure)});
    }
    for (const auto& record : flight->records) {
      if (record.kind != FlightRecord::note) continue;
      findings.push_back({Finding::remark, evidence.entered(rank, record),
                          fmt::format("rank {} {}", rank, printable(record.print.text))});
    }
  }
}

std::string nothing_wrong(const Evidence& evidence) {
  const Flight::Record* last = nullptr;
  int64_t when = 0;
  for (const auto& [rank, flight] : evidence.flights()) {
    for (const auto& record : flight->records) {
      if (record.kind != FlightRecord::collective || evidence.time(rank, record.finished) <= when) continue;
      when = evidence.time(rank, record.finished);
      last = &record;
    }
  }
  return last == nullptr ? "no rank has entered a collective"
                         : fmt::format("no rank waits for another; the last collective is {}", describe(*last));
}

}  // namespace

std::string describe(const Flight::Record& record) {
  switch (record.kind) {
    case FlightRecord::note:
      return printable(record.print.text);
    case FlightRecord::wait:
      return fmt::format("the wait for what its peers publish: {}", printable(record.print.text));
    default:
      return fmt::format("#{} {}", record.print.number - 1, describe(record.print));
  }
}

std::vector<std::string> verdict(const std::vector<Flight>& flights) {
  const Evidence evidence(flights);
  Findings findings;
  find_ranks_without_record(evidence, findings);
  for (const auto& group : evidence.groups()) {
    find_differences(evidence, group, findings);
    find_missing(evidence, group, findings);
    find_unfinished(evidence, group, findings);
  }
  find_other_waits(evidence, findings);
  find_ends(evidence, findings);
  std::stable_sort(findings.begin(), findings.end(), [](const Finding& a, const Finding& b) {
    return std::pair(a.weight, a.when) < std::pair(b.weight, b.when);
  });
  std::vector<std::string> sentences;
  if (findings.empty() || findings.front().weight >= Finding::remark) sentences.push_back(nothing_wrong(evidence));
  for (auto& finding : findings) sentences.push_back(std::move(finding.text));
  return sentences;
}

}  // namespace shoal
