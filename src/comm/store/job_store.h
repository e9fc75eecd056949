#pragma once
// The job's store as the launcher of one node sees it. The header hides libtorch.

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/rendezvous/job_identity.h"

namespace shoal {

// One node serves the store, the others are clients. With several nodes a thread does all calls, so that none of these
// waits: it connects again whenever the store does not answer, and what is reported meanwhile is sent then.
class JobStore {
 public:
  // A job on several nodes that others may join, as the launcher of node 0 describes it.
  struct Terms {
    int first_ranks = 0;
    int most_ranks = 0;
    int min_ranks = 0;
    int node = 0;  // of the launcher that asks: a number that no other one has
  };
  // For the launcher of a node that comes to such a job, before it makes a JobStore. UsageError if nobody listens there
  // within the time, or the job is another one.
  static Terms find(const std::string& address, int port, const JobIdentity& job, int timeout_seconds);

  // Takes the port on node 0. UsageError names one that is in use. port 0: any free one, of a job of one node. silence:
  // after which a launcher of which nothing is heard has ended.
  JobStore(int nodes, int node, const std::string& address, int port,
           std::chrono::milliseconds silence = std::chrono::seconds(15));
  // Waits for a call that is on its way, a few seconds at most.
  ~JobStore();
  JobStore(const JobStore&) = delete;
  JobStore& operator=(const JobStore&) = delete;

  // Serves it, on node 0. Has threads from then on: after all ranks are forked.
  void begin(const JobIdentity& job);
  int port() const;

  // Why the ranks of all nodes must end, as a sentence, which the ranks read, too. The first report counts.
  void report_failure(const std::string& text);
  // What another launcher has reported; empty: nothing.
  std::string failure_elsewhere() const;
  // That the process of a rank has ended, well or not, for ranks that wait for it to come, and for those of an elastic
  // job on other nodes.
  void report_end(int rank);
  // Before begin(), on all nodes: what launchers find that come to the job. most_ranks 0: none may.
  void open(const Terms& terms);
  // Asks for the number of a process that is to join; take_number() has one for each call, once the store has answered.
  void ask_for_number(int first_ranks);
  std::optional<int> take_number();
  // Whether the process of this number has become a member, as far as it is known; with `wait`, the store is asked, for
  // a few seconds at most.
  bool has_joined(int number, bool wait);
  // Ranks of any node that their launchers are to kill: others of an elastic job have waited for them for too long.
  std::vector<int> overdue() const;
  // Why an elastic job is lost, as a rank of any node says before it ends; empty: none does.
  std::string lost() const;
  // Members of the job that run on this node, for the other launchers, and on the others, as they have last said.
  void set_members(int count);
  int members_elsewhere() const;
  // Whether no node has members any more, in a job that was open to newcomers, for 5 s.
  bool nobody_trains() const;
  // All ranks of this node have ended.
  void leave();
  // After it, whether this launcher may end: on node 0, all others have left or ended, whose ranks may still use the
  // store; on others, that it has left is known, or cannot be told for 5 s.
  bool may_end() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace shoal
