#include "comm/flight/verdict.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <map>
#include <optional>
#include <set>

namespace shoal {
namespace {

using Record = Flight::Record;

// What one group's ranks have called. Ranks are those of the world.
struct GroupView {
  std::string name;
  std::vector<int> ranks;                                        // those that have left a record
  std::map<int, std::map<uint64_t, const Record*>> collectives;  // by rank, then by number

  const Record* find(int rank, uint64_t number) const {
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

struct Finding {
  enum Weight { differs, missing, late, under_way, unheard, absent, remark };
  Weight weight;
  int64_t when = 0;
  std::string text;
};

std::string words(const std::vector<int>& ranks) {
  return fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "));
}

class Judge {
 public:
  explicit Judge(const std::vector<Flight>& flights) {
    for (const auto& flight : flights) flights_[flight.rank] = &flight;
    std::map<std::string, GroupView> groups;
    for (const auto& flight : flights) {
      end_ = std::max(end_, time(flight.rank, flight.failed));
      for (const auto& group : flight.groups) view(groups, group);
    }
    for (const auto& flight : flights) {
      for (const auto& record : flight.records) {
        end_ = std::max({end_, time(flight.rank, record.entered), time(flight.rank, record.finished)});
        if (record.kind != FlightRecord::collective || record.group < 0) continue;
        groups.at(flight.groups[record.group].name).collectives[flight.rank][record.print.number] = &record;
      }
    }
    for (auto& [name, group] : groups) {
      // Ranks compare their calls on a group of its own before each operation; the operation itself says more.
      if (!name.ends_with("/checks")) groups_.push_back(std::move(group));
    }
  }

  std::vector<std::string> judge() {
    look_for_ranks_without_record();
    for (const auto& group : groups_) {
      look_for_differences(group);
      look_for_missing(group);
      look_for_unfinished(group);
    }
    look_for_other_waits();
    look_at_ends();
    std::stable_sort(findings_.begin(), findings_.end(), [](const Finding& a, const Finding& b) {
      return std::pair(a.weight, a.when) < std::pair(b.weight, b.when);
    });
    std::vector<std::string> sentences;
    if (findings_.empty() || findings_.front().weight >= Finding::remark) sentences.push_back(nothing_wrong());
    for (auto& finding : findings_) sentences.push_back(std::move(finding.text));
    return sentences;
  }

 private:
  void view(std::map<std::string, GroupView>& groups, const Flight::Members& members) const {
    auto& group = groups[members.name];
    if (!group.ranks.empty()) return;
    group.name = members.name;
    for (const int rank : members.world_ranks) {
      if (flights_.count(rank) == 0) continue;
      group.ranks.push_back(rank);
      group.collectives[rank];
    }
  }

  // Nanoseconds that ranks share: their clock on one host, the calendar's between hosts; 0 stays.
  int64_t time(int rank, int64_t own) const {
    if (own == 0) return 0;
    const auto& host = flights_.at(rank)->host;
    const auto first =
        std::find_if(flights_.begin(), flights_.end(), [&](const auto& entry) { return entry.second->host == host; });
    return own + first->second->epoch_ns;
  }
  int64_t entered(int rank, const Record& record) const { return time(rank, record.entered); }

  // Ranks enter operations in the same order, so this tells what came first.
  int64_t first_entry(const GroupView& group, uint64_t number) const {
    int64_t first = std::numeric_limits<int64_t>::max();
    for (const int rank : group.ranks) {
      const auto* record = group.find(rank, number);
      if (record != nullptr) first = std::min(first, entered(rank, *record));
    }
    return first;
  }

  static std::string seconds(int64_t nanoseconds) { return fmt::format("{:.1f} s", 1e-9 * double(nanoseconds)); }

  bool in_job(int rank) const {
    const auto& flight = *flights_.at(rank);
    return flight.left == 0 && flight.state != ProcessState::gone;
  }
  // It has ended, and nothing says why.
  bool vanished(int rank) const {
    const auto& flight = *flights_.at(rank);
    return flight.left == 0 && flight.failed == 0 && flight.state == ProcessState::gone;
  }
  std::string condition(int rank) const {
    const auto& flight = *flights_.at(rank);
    const auto pid = flight.process.pid;
    if (flight.state == ProcessState::stopped) return fmt::format("it (pid {}) is stopped by a signal", pid);
    if (in_job(rank)) return flight.state ? fmt::format("it (pid {}) runs", pid) : "it is on another host";
    if (flight.failed != 0) return "it has failed";
    if (flight.left != 0) return "it has left the job in order";
    return fmt::format("it (pid {}) is gone: killed, crashed or ended early", pid);
  }
  std::string last_words(const GroupView& group, int rank) const {
    const auto number = group.last(rank);
    if (number == 0) return "it has entered none there";
    const auto& record = *group.find(rank, number);
    return fmt::format("its last there is {}, {}finished", describe(record), record.finished == 0 ? "not " : "");
  }
  static std::string of(const GroupView& group) {
    return group.name == "world" ? "" : fmt::format(" of group '{}'", group.name);
  }

  void look_for_ranks_without_record() {
    const int size = flights_.begin()->second->size;
    std::vector<int> ranks;
    for (int rank = 0; rank < size; ++rank) {
      if (flights_.count(rank) == 0) ranks.push_back(rank);
    }
    if (ranks.empty()) return;
    findings_.push_back(
        {Finding::absent, 0,
         fmt::format("{} of {}: no record here; on another host, or never started", words(ranks), size)});
  }

  void look_for_differences(const GroupView& group) {
    std::set<uint64_t> numbers;
    for (const auto& [rank, own] : group.collectives) {
      for (const auto& [number, record] : own) numbers.insert(number);
    }
    for (const auto number : numbers) {
      std::vector<std::vector<int>> camps;  // of ranks that called the same
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
        calls.push_back(fmt::format("{} called {}", words(ranks), describe(group.find(ranks[0], number)->print)));
      }
      auto text =
          fmt::format("ranks called different operations as #{}{}: {}", number - 1, of(group), fmt::join(calls, ", "));
      const auto how = explain(group, number, camps[0][0], camps[1][0]);
      if (!how.empty()) text += "; " + how;
      findings_.push_back({Finding::differs, entered(camps[1][0], *group.find(camps[1][0], number)), text});
      return;  // what follows it says nothing
    }
  }

  // What `odd` did with `number` that `usual` did not, if the next operation tells.
  static std::string explain(const GroupView& group, uint64_t number, int usual, int odd) {
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

  // Of ranks that are behind: the first operation that they have not entered and others have.
  void look_for_missing(const GroupView& group) {
    std::map<uint64_t, std::vector<int>> behind;
    for (const int rank : group.ranks) {
      const auto next = group.last(rank) + 1;
      const bool others = std::any_of(group.ranks.begin(), group.ranks.end(),
                                      [&](int other) { return group.find(other, next) != nullptr; });
      if (others) behind[next].push_back(rank);
    }
    for (const auto& [number, ranks] : behind) {
      std::vector<int> waiting;
      const Record* call = nullptr;
      for (const int rank : group.ranks) {
        const auto* record = group.find(rank, number);
        if (record == nullptr) continue;
        call = record;
        if (record->finished == 0) waiting.push_back(rank);
      }
      const auto since = first_entry(group, number);
      for (const int rank : ranks) {
        if (waiting.empty() && in_job(rank)) continue;  // it will come
        std::string text = fmt::format("rank {} {} entered {}{}: {}; {}", rank, in_job(rank) ? "has not" : "never",
                                       describe(*call), of(group), condition(rank), last_words(group, rank));
        if (!waiting.empty()) {
          text += fmt::format("; {} waited for it, {} to the end of the record", words(waiting), seconds(end_ - since));
        }
        // One that was told of a failure, or that waits in another group, is not the cause.
        const bool follows = flights_.at(rank)->failed != 0 || waits_elsewhere(rank, group);
        findings_.push_back({follows ? Finding::under_way : Finding::missing, since, text});
      }
    }
  }

  bool waits_elsewhere(int rank, const GroupView& here) const {
    return std::any_of(groups_.begin(), groups_.end(), [&](const GroupView& group) {
      if (group.name == here.name || group.collectives.count(rank) == 0) return false;
      const auto& own = group.collectives.at(rank);
      return std::any_of(own.begin(), own.end(), [](const auto& entry) { return entry.second->finished == 0; });
    });
  }

  // The first operation that all have entered and some have not finished.
  void look_for_unfinished(const GroupView& group) {
    for (const auto& [number, unused] :
         group.collectives.empty() ? std::map<uint64_t, const Record*>() : group.collectives.begin()->second) {
      std::vector<int> waiting;
      bool all = true;
      for (const int rank : group.ranks) {
        const auto* record = group.find(rank, number);
        all = all && record != nullptr;
        if (record != nullptr && record->finished == 0) waiting.push_back(rank);
      }
      if (!all || waiting.empty()) continue;
      if (!blame_those_gone(group, number, waiting) && !blame_the_late(group, number)) {
        const auto& record = *group.find(waiting[0], number);
        findings_.push_back(
            {Finding::under_way, entered(waiting[0], record),
             fmt::format("all ranks have entered {}{}, and {} not finished it: its data are under way, "
                         "or a rank does not wait for it",
                         describe(record), of(group), words(waiting) + (waiting.size() == 1 ? " has" : " have"))});
      }
      return;
    }
  }

  bool blame_those_gone(const GroupView& group, uint64_t number, const std::vector<int>& waiting) {
    bool found = false;
    for (const int rank : waiting) {
      const auto& record = *group.find(rank, number);
      if (!vanished(rank) && flights_.at(rank)->state != ProcessState::stopped) continue;
      found = true;
      findings_.push_back({Finding::missing, first_entry(group, number),
                           fmt::format("rank {} entered {}{} and did not finish it: {}", rank, describe(record),
                                       of(group), condition(rank))});
    }
    return found;
  }

  bool blame_the_late(const GroupView& group, uint64_t number) {
    for (const int other : group.ranks) {
      const auto gave_up = time(other, flights_.at(other)->failed);
      if (gave_up == 0) continue;
      for (const int rank : group.ranks) {
        const auto& record = *group.find(rank, number);
        if (entered(rank, record) <= gave_up) continue;
        const auto& theirs = *group.find(other, number);
        findings_.push_back(
            {Finding::late, gave_up,
             fmt::format("rank {} entered {}{} {} later than rank {}, which had given up by then", rank,
                         describe(record), of(group), seconds(entered(rank, record) - entered(other, theirs)), other)});
        return true;
      }
    }
    return false;
  }

  // Messages, and what peers publish on their own.
  void look_for_other_waits() {
    for (const auto& [rank, flight] : flights_) {
      for (const auto& record : flight->records) {
        const bool message = record.kind == FlightRecord::message;
        if (record.finished != 0 || (!message && record.kind != FlightRecord::wait)) continue;
        findings_.push_back({Finding::unheard, entered(rank, record),
                             fmt::format("rank {} has not finished {}{}", rank, describe(record),
                                         message ? fmt::format(", with rank {} of its group", record.peer) : "")});
        break;
      }
    }
  }

  void look_at_ends() {
    for (const auto& [rank, flight] : flights_) {
      if (vanished(rank)) {
        findings_.push_back({Finding::remark, end_, fmt::format("rank {}: {}", rank, condition(rank))});
      }
      if (flight->failed != 0) {
        findings_.push_back(
            {Finding::remark, time(rank, flight->failed), fmt::format("rank {} failed: {}", rank, flight->failure)});
      }
      for (const auto& record : flight->records) {
        if (record.kind != FlightRecord::note) continue;
        findings_.push_back(
            {Finding::remark, entered(rank, record), fmt::format("rank {} {}", rank, record.print.text)});
      }
    }
  }

  std::string nothing_wrong() const {
    const Record* last = nullptr;
    int64_t when = 0;
    for (const auto& [rank, flight] : flights_) {
      for (const auto& record : flight->records) {
        if (record.kind != FlightRecord::collective || time(rank, record.finished) <= when) continue;
        when = time(rank, record.finished);
        last = &record;
      }
    }
    return last == nullptr ? "no rank has entered a collective"
                           : fmt::format("no rank waits for another; the last collective is {}", describe(*last));
  }

  std::map<int, const Flight*> flights_;
  std::vector<GroupView> groups_;
  std::vector<Finding> findings_;
  int64_t end_ = 0;  // the last time in any record
};

}  // namespace

std::string describe(const Record& record) {
  switch (record.kind) {
    case FlightRecord::note:
      return record.print.text;
    case FlightRecord::wait:
      return fmt::format("the wait for what its peers publish: {}", record.print.text);
    default:
      return fmt::format("#{} {}", record.print.number - 1, describe(record.print));
  }
}

std::vector<std::string> verdict(const std::vector<Flight>& flights) {
  return Judge(flights).judge();
}

}  // namespace shoal
