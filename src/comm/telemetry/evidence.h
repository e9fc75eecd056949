#pragma once
// Evidence from a job's flight recorder files, arranged for analysis.

#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "comm/telemetry/flight_reader.h"

namespace shoal {

// Calls of one group's ranks. Ranks are world ranks.
struct GroupView {
  std::string name;
  std::vector<int> ranks;                                                // ranks with a record
  std::vector<int> unknown;                                              // ranks whose record leaves the group out
  std::map<int, std::map<uint64_t, const Flight::Record*>> collectives;  // by rank, then by number
  std::unordered_set<uint64_t> numbers{};                                // of all ranks' collectives

  const Flight::Record* find(int rank, uint64_t number) const {
    const auto& own = collectives.at(rank);
    const auto found = own.find(number);
    return found == own.end() ? nullptr : found->second;
  }
  // Whether some rank has a record of the collective.
  bool has(uint64_t number) const { return numbers.contains(number); }
  // Number of the rank's last collective; 0: none.
  uint64_t last(int rank) const {
    const auto& own = collectives.at(rank);
    return own.empty() ? 0 : own.rbegin()->first;
  }
};

// Finding with its weight and time, in nanoseconds of one time base (Evidence::time).
struct Finding {
  enum Weight { differs, missing, late, under_way, unheard, absent, remark };
  Weight weight;
  int64_t when = 0;
  std::string text;
};

using Findings = std::vector<Finding>;

class Evidence {
 public:
  // `flights` must outlive this object.
  explicit Evidence(const std::vector<Flight>& flights);

  const std::map<int, const Flight*>& flights() const { return flights_; }
  const std::vector<GroupView>& groups() const { return groups_; }
  int64_t end() const { return end_; }  // latest time in any record

  // Nanoseconds on a time base that ranks share: the steady clock on one host, the calendar between hosts. 0 stays 0.
  int64_t time(int rank, int64_t own) const;
  int64_t entered(int rank, const Flight::Record& record) const { return time(rank, record.entered); }
  // Time of the first rank's entry. Ranks enter operations in the same order, so it orders operations.
  int64_t first_entry(const GroupView& group, uint64_t number) const;

  bool in_job(int rank) const;
  // Whether the rank has ended without leaving a reason.
  bool vanished(int rank) const;
  std::string condition(int rank) const;

 private:
  // By rank: the names of its groups, where its record leaves others out.
  using Names = std::unordered_map<int, std::unordered_set<std::string>>;
  void view(std::map<std::string, GroupView>& groups, const Flight::Members& members, const Names& incomplete) const;

  std::map<int, const Flight*> flights_;
  std::unordered_map<int, int64_t> epochs_;  // of the first rank on each rank's host
  std::vector<GroupView> groups_;
  int64_t end_ = 0;
};

// "ranks 0, 2"
std::string rank_words(const std::vector<int>& ranks);
// " of group 'name'"; empty for the world.
std::string of_group(const GroupView& group);

// differences.cpp: the first operation in which ranks have called different things.
void find_differences(const Evidence& evidence, const GroupView& group, Findings& findings);
// waits.cpp: the first operation that some ranks have entered and lagging ranks have not.
void find_missing(const Evidence& evidence, const GroupView& group, Findings& findings);
// The first operation that all ranks have entered and some have not finished.
void find_unfinished(const Evidence& evidence, const GroupView& group, Findings& findings);
// Waits for messages, and for data that peers publish on their own.
void find_other_waits(const Evidence& evidence, Findings& findings);

}  // namespace shoal
