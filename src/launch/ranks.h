#pragma once
// Processes of a launcher's ranks, and what their ends mean for the job.

#include <cstdint>
#include <vector>

#include "launch/child.h"
#include "launch/launcher.h"
#include "launch/newcomers.h"

namespace shoal {

class Ranks {
 public:
  // first_ranks: that the job started with, on all nodes. options and newcomers must outlive this object.
  Ranks(const LaunchOptions& options, int first_ranks, Newcomers& newcomers)
      : options_(options), first_ranks_(first_ranks), newcomers_(newcomers) {}

  // In the order of their start, also those that have ended.
  std::vector<Child>& children() { return children_; }
  const std::vector<Child>& children() const { return children_; }

  // Whether the rank is one of the job's: a newcomer is once it was admitted. wait: the job's store is asked.
  bool belongs(const Child& child, bool wait = false) const;
  // That run, whether they belong or not.
  int64_t alive() const;
  // That run and belong.
  int members() const;
  // That have not failed. Of those on other nodes nothing is known here: they count themselves.
  int64_t not_failed() const;
  // Whether the other ranks go on in spite of the failures so far.
  bool go_on() const;
  // They do not, from now on: a rank has given the job up.
  void give_up() { given_up_ = true; }
  bool given_up() const { return given_up_; }
  // How many of the last newcomers have not joined or have left again, in a row.
  int failed_joins() const;
  bool pipes_open() const;

  // Stops those that run, as a terminal would (SIGTSTP); their process groups.
  std::vector<pid_t> stop() const;
  // reap: waits until they have ended.
  void signal_all(int signal, bool reap = false);

 private:
  const LaunchOptions& options_;
  const int first_ranks_;
  Newcomers& newcomers_;
  std::vector<Child> children_;
  bool given_up_ = false;
};

}  // namespace shoal
