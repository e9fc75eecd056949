#pragma once
// State of groups and work handles.

#include <unistd.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/agreement/call_history.h"
#include "comm/rendezvous/liveness.h"
#include "comm/telemetry/call_watch.h"
#include "comm/transport/transport.h"
#include "shoal/error.h"
#include "shoal/group.h"

namespace shoal {

struct WorldState;
struct GroupState;
class StuckWait;

// First reason why a group is unusable. Thread-safe.
class GroupFailure {
 public:
  // Empty while the group works.
  std::string text() const {
    const std::lock_guard lock(mutex_);
    return text_;
  }
  // Sets the reason; true if it is the first one.
  bool set(const std::string& text) {
    const std::lock_guard lock(mutex_);
    if (!text_.empty()) return false;
    text_ = text;
    return true;
  }

 private:
  mutable std::mutex mutex_;
  std::string text_;
};

// A call of a group whose generation is over, in an elastic job.
class GroupEnded : public CommError {
 public:
  using CommError::CommError;
};

// State shared by all handles of a group, recorded or not. One thread issues operations, but several may wait for them:
// a backend's futures have a thread of their own.
struct GroupProgress {
  GroupStatistics issued;  // without waiting time
  std::atomic<double> waited_s = 0;
  std::atomic<int64_t> timeout_ms = 0;  // of an operation; 0: the world's
  GroupFailure failure;
  GroupFailure ended;                         // in an elastic job: the generation of the group is over
  std::map<std::vector<int>, int> subgroups;  // number of groups made of these ranks, for names
  int gossip_channels = 0;                    // number of channels opened, for names
  int reducers = 0;                           // number of reducers made, for labels
  std::shared_ptr<CallHistory> calls;         // collectives
  int flight_group = -1;                      // the group's number in the flight recorder
  uint64_t collectives = 0;                   // number of collectives entered, for the flight recorder
  uint64_t messages = 0;                      // number of sends and receives, likewise
  ~GroupProgress();
  std::shared_ptr<Transport> transport;
  // Operations in flight whose Work was destroyed by an exception.
  std::vector<std::unique_ptr<TransportWork>> left_behind;
  // Issues the bucket of a Reducer that waits for the end of a backward.
  std::weak_ptr<std::function<void()>> waiting_bucket{};
  const int pid = getpid();
  std::shared_ptr<GroupState> checks;  // group of the same ranks that compares calls; nullptr: no need
};

struct GroupState {
  std::string name;
  int rank = 0;
  std::vector<int> world_ranks;          // by rank of the group
  std::shared_ptr<Transport> transport;  // takes this handle's calls: that of `progress`, or a decorator
  std::shared_ptr<GroupProgress> progress;
  std::shared_ptr<WorldState> world;
  std::vector<std::shared_ptr<CallLog>> logs{};  // of a recorded handle
  bool by_host = false;  // it was asked for as that of a host, also where there is one host only
};

// Whether the group of this name exists to compare calls of another group.
bool compares_calls(const std::string& group);
const std::shared_ptr<GroupState>& state_of(const Group& group);
// Creates the transport of these ranks. Collective over them. limit: see Group::subgroup.
std::shared_ptr<GroupState> make_group_state(std::shared_ptr<WorldState> world, std::string name,
                                             std::vector<int> world_ranks, std::optional<Milliseconds> limit = {});

// DisagreeError on all ranks if ranks call different things. Only if the world is configured so and the transport does
// not check this itself.
void check_agreement(const std::shared_ptr<GroupState>& state, const Call& call);
// Checks and starts a call; every collective of Group ends up here. UsageError and CommError as there.
Work issue(const Group& group, Call call);

// This rank cannot finish what the others wait for, and its program may go on: all operations of the group fail, on
// this rank and on the others, and say why. Nothing in an elastic job, whose ranks find it out together.
void leave_group(const Group& group, const std::string& why);

// Adds a line to the flight recorder, if there is one.
void note(const Group& group, const std::string& text);

// Waits for `work`, which `call` describes, with the group's deadline and error handling.
void wait_for(const std::shared_ptr<GroupState>& group, Call call, std::unique_ptr<TransportWork> work);

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
