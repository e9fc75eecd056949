#pragma once
// A job's ranks on this host, from start to end.

#include <chrono>
#include <optional>
#include <string>

#include "base/without_sigpipe.h"
#include "comm/store/job_store.h"
#include "launch/interruption.h"
#include "launch/launcher.h"
#include "launch/newcomers.h"
#include "launch/output.h"
#include "launch/ranks.h"
#include "launch/signals.h"
#include "launch/stop_times.h"
#include "launch/watcher.h"

namespace shoal {

// Of several nodes, the same on all.
std::string name_of_job(const std::string& address, int port);

class Job {
 public:
  // first_ranks: of all nodes. options: must outlive this object.
  Job(const LaunchOptions& options, int first_ranks);
  ~Job();
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  // As launch().
  int run();

 private:
  void warn_of_strangers();
  void start(int rank);
  bool start_newcomer(const std::string& why);
  bool start_asked();
  void add_rank();
  void replace(int rank);
  bool ending() const;
  std::string run_id() const;
  void tell_watcher(bool (Watcher::*tell)(pid_t) const, pid_t group);

  void step();
  void look_at_other_nodes();
  void look_for_loss();
  void end_late_newcomers();
  void end_overdue();
  void reap();
  void reap_orphans();
  bool note_end(Child& child, int status);
  void note_stop(Child& child, int status);
  void note_interrupted_end(const Child& child, int status);
  void interrupt(const Signals::Asked& asked);
  void tell_to_stop();
  void suspend();
  void look_for_reader();
  void end_late();
  void forward_the_rest();
  void print_verdict();
  int result() const;

  const LaunchOptions& options_;
  const int first_ranks_;
  const std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
  const WithoutSigpipe without_sigpipe_;  // the reader of the output may end before the ranks do
  Signals signals_;
  Output output_;
  const std::string id_;
  Watcher watcher_;  // made before there are threads
  const std::string secret_;
  JobStore store_;
  Newcomers newcomers_;
  Ranks ranks_;
  StopTimes stop_times_;
  int restarts_ = 0;
  std::optional<int> code_;          // exit code of the first failure
  std::optional<int> last_failure_;  // of an elastic job: since then no rank has ended well
  bool succeeded_ = false;           // of any rank
  Interruption interruption_;
  bool unread_ = false;  // interrupted because nobody reads the output any more
  bool told_of_others_ = false;
  bool waits_no_more_ = false;  // for other nodes
  bool watcher_has_ended_ = false;
};

}  // namespace shoal
