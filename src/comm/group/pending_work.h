#pragma once
// Operation of a group in flight, and its waits.

#include <memory>
#include <optional>
#include <string>

#include "comm/group/group_state.h"
#include "comm/rendezvous/liveness.h"
#include "comm/telemetry/call_watch.h"
#include "comm/transport/transport.h"

namespace shoal {

class StuckWait;

class PendingWork {
 public:
  // watch: has seen the call begin.
  PendingWork(std::shared_ptr<GroupState> group, Call call, CallWatch watch);
  ~PendingWork();
  // For work that is already in flight; `call` describes it.
  PendingWork(std::shared_ptr<GroupState> group, Call call, std::unique_ptr<TransportWork> work);
  PendingWork(const PendingWork&) = delete;
  PendingWork& operator=(const PendingWork&) = delete;

  void wait();
  // Waits up to `limit`; true when finished. to_the_end: the caller does nothing else until it is.
  bool wait_for(Milliseconds limit, bool to_the_end);
  bool done();
  int source() const;

 private:
  struct Waiting;
  struct Polling;

  void wait_to_the_end();
  // CommError in an elastic job that has lost a rank.
  void require_generation();
  // One slice of a wait, and the checks after it; true when finished. to_the_end: the caller waits until it is.
  bool wait_slice(Milliseconds limit, bool to_the_end);
  // Waits for the transport, and progresses what else is in flight.
  bool wait_for_transport(Milliseconds limit, Milliseconds left);
  // A fault of a rank that this operation still needs.
  std::optional<Fault> fault_of_peers();
  // Tells the others that this rank has failed, and makes sure that nobody uses its tensors any more.
  void abandon(const std::string& why, int culprit);
  StuckWait stuck() const;
  Milliseconds timeout() const;
  // why: used unless ranks have called different things, and one of them has ended because of that.
  [[noreturn]] void fail(int rank, const std::string& why);
  // Waits a moment for the cause of the transport's error to show.
  [[noreturn]] void fail_from(const std::exception& error);
  // difference: the same sentence on all ranks.
  [[noreturn]] void disagree(const std::string& difference);

  std::shared_ptr<GroupState> group_;
  Call call_;
  CallWatch watch_;
  int64_t number_;
  uint64_t collective_ = 0;  // number of this collective in the group
  bool published_ = false;   // peers progress it without this rank
  bool finished_ = false;
  std::unique_ptr<TransportWork> work_;
  std::unique_ptr<Waiting> waiting_;  // since the first wait
  std::unique_ptr<Polling> polling_;  // since the first done()
};

}  // namespace shoal
