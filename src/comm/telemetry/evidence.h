#pragma once
// The flights of a job, in the order that questions about them need.

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "comm/telemetry/flight_reader.h"

namespace shoal {

// What one group's ranks have called. Ranks are those of the world.
struct GroupView {
  std::string name;
  std::vector<int> ranks;                                                // those that have left a record
  std::map<int, std::map<uint64_t, const Flight::Record*>> collectives;  // by rank, then by number

  const Flight::Record* find(int rank, uint64_t number) const {
    const auto& own = collectives.at(rank);
    const auto found = own.find(number);
    return found == own.end() ? nullptr : found->second;
  }
  // 0: none.
  uint64_t last(int rank) const {
    const auto& own = collectives.at(rank);
    return own.empty() ? 0 : own.rbegin()->first;
  }
};

// Nanoseconds are of one time base, see Evidence::time.
struct Finding {
  enum Weight { differs, missing, late, under_way, unheard, absent, remark };
  Weight weight;
  int64_t when = 0;
  std::string text;
};

using Findings = std::vector<Finding>;

class Evidence {
 public:
  // `flights` must outlive it.
  explicit Evidence(const std::vector<Flight>& flights);

  const std::map<int, const Flight*>& flights() const { return flights_; }
  const std::vector<GroupView>& groups() const { return groups_; }
  int64_t end() const { return end_; }  // the last time in any record

  // Nanoseconds that ranks share: their clock on one host, the calendar's between hosts; 0 stays.
  int64_t time(int rank, int64_t own) const;
  int64_t entered(int rank, const Flight::Record& record) const { return time(rank, record.entered); }
  // Ranks enter operations in the same order, so this tells what came first.
  int64_t first_entry(const GroupView& group, uint64_t number) const;

  bool in_job(int rank) const;
  // It has ended, and nothing says why.
  bool vanished(int rank) const;
  std::string condition(int rank) const;

 private:
  void view(std::map<std::string, GroupView>& groups, const Flight::Members& members) const;

  std::map<int, const Flight*> flights_;
  std::vector<GroupView> groups_;
  int64_t end_ = 0;
};

// "ranks 0, 2"
std::string rank_words(const std::vector<int>& ranks);
// " of group 'name'"; nothing for the world.
std::string of_group(const GroupView& group);

// differences.cpp: the first operation as which ranks have called different things.
void find_differences(const Evidence& evidence, const GroupView& group, Findings& findings);
// waits.cpp: of ranks that are behind, the first operation that they have not entered and others have.
void find_missing(const Evidence& evidence, const GroupView& group, Findings& findings);
// The first operation that all have entered and some have not finished.
void find_unfinished(const Evidence& evidence, const GroupView& group, Findings& findings);
// Messages, and what peers publish on their own.
void find_other_waits(const Evidence& evidence, Findings& findings);

}  // namespace shoal
