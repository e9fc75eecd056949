#pragma once
// State of groups.

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
#include "comm/transport/transport.h"
#include "shoal/error.h"
#include "shoal/group.h"

namespace shoal {

struct WorldState;
struct GroupState;

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

inline bool is_message(const Call& call) {
  return call.op == Op::send || call.op == Op::recv;
}

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

// Makes `why` the reason why the group is unusable. True if it is its first one.
bool set_failure(const GroupState& state, const std::string& why);

// Waits for `work`, which `call` describes, with the group's deadline and error handling.
void wait_for(const std::shared_ptr<GroupState>& group, Call call, std::unique_ptr<TransportWork> work);

}  // namespace shoal
