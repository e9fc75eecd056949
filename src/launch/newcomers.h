#pragma once
// Processes that join an elastic job while it runs, as the launcher of one node knows them.

#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/membership/join_board.h"
#include "comm/store/job_store.h"
#include "launch/child.h"
#include "launch/launcher.h"
#include "shoal/detail/clock.h"

namespace shoal {

// Their numbers, and who of them has become a member: from a table in this process's memory for a job of one node,
// otherwise from the job's store, which answers later.
class Newcomers {
 public:
  // job: id of this launcher's. store: must outlive this object. UsageError without shared memory.
  Newcomers(const LaunchOptions& options, int first_ranks, const std::string& job, JobStore& store);

  // Whether ranks may join at all.
  bool possible() const { return most_ranks_ > 0; }
  bool is_one(int rank) const { return possible() && rank >= first_ranks_; }
  // Whether a newcomer has become a member, as far as it is known; with `wait`, the store is asked.
  bool is_member(int rank, bool wait = false);
  // Whether a newcomer that is no member was one. From the job's store it is not known.
  bool has_left(int rank) const { return board_ && board_->was_admitted(rank) && !board_->is_member(rank); }
  // Members that run on other nodes, as far as it is known.
  int64_t elsewhere() const { return board_ ? 0 : store_.members_elsewhere(); }
  // Whether there is nothing to join any more, where no member runs on this node.
  bool too_late() const { return board_ || store_.nobody_trains(); }

  // A process is to be started. why: for people.
  void ask(const std::string& why);
  size_t asked() const { return asked_.size(); }
  // Number and reason of one that has been asked for; nothing: there is none, or its number is not known yet.
  std::optional<std::pair<int, std::string>> next();
  // Reasons of those for which there is no number after a time, or at all. They are not started.
  std::vector<std::string> given_up();

  // None of those asked for is started. Their reasons.
  std::vector<std::string> drop();

  // Adds what a rank needs to find the others.
  void add_variables(int rank, Variables& list) const;

 private:
  struct Asked {
    std::string why;
    Clock::time_point since;
  };

  int first_ranks_;
  int most_ranks_;
  std::string address_;
  std::string job_;
  JobStore& store_;
  std::optional<JoinBoard> board_;
  int next_;
  std::deque<Asked> asked_;
};

}  // namespace shoal
