#pragma once
// The job's store as the launcher of one node sees it. The header hides libtorch.

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "comm/rendezvous/job_identity.h"

namespace shoal {

// One node serves the store, the others are clients. Reports never throw, and take 2 s at most: a store that does not
// answer is not asked again. For one thread.
class JobStore {
 public:
  // Takes the port on node 0. UsageError names one that is in use. port 0: any free one, of a job of one node.
  JobStore(int nodes, int node, const std::string& address, int port);
  ~JobStore();
  JobStore(const JobStore&) = delete;
  JobStore& operator=(const JobStore&) = delete;

  // Serves it, on node 0. Has threads from then on: after all ranks are forked.
  void begin(const JobIdentity& job);
  int port() const;

  // Why the ranks of all nodes must end, as a sentence, which the ranks read, too. The first report counts.
  void report_failure(const std::string& text);
  // What another launcher has reported, asked about once a second; empty: nothing.
  std::string failure_elsewhere();
  // That the process of a rank has ended, well or not, for ranks of an elastic job on other nodes.
  void report_end(int rank);
  // All ranks of this node have ended. On node 0, returns once the other nodes have said so too, after the limit, or when
  // `given_up` says so: their ranks may still use the store.
  void leave(std::chrono::seconds limit, const std::function<bool()>& given_up);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace shoal
