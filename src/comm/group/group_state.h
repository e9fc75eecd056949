#pragma once
// Implementation of Group and Work.

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/agreement/call_history.h"
#include "comm/telemetry/call_watch.h"
#include "comm/transport/transport.h"
#include "shoal/group.h"

namespace shoal {

struct WorldState;
struct GroupState;
class StuckWait;

// Why a group is unusable; the first reason stays. Thread-safe.
class GroupFailure {
 public:
  // Empty: the group works.
  std::string text() const {
    const std::lock_guard lock(mutex_);
    return text_;
  }
  // True if this is the first reason.
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

// Shared by all handles of a group, recorded or not. One thread issues operations, but others may wait for them: a
// backend's futures have a thread of their own.
struct GroupProgress {
  GroupStatistics issued;  // without the time waited
  std::atomic<double> waited_s = 0;
  GroupFailure failure;
  std::map<std::vector<int>, int> subgroups;       // how many were made of these ranks, for their names
  int gossip_channels = 0;                         // how many were opened, for their names
  int reducers = 0;                                // how many were made, for the labels of their operations
  std::shared_ptr<CallHistory> calls;              // collectives
  int flight_group = -1;                           // its number in the flight recorder
  uint64_t collectives = 0;                        // for the flight recorder: how many this rank has entered
  uint64_t messages = 0;                           // the same of sends and receives
  ~GroupProgress();
  std::shared_ptr<Transport> transport;
  // Operations in flight that nobody waits for, since an exception has passed their Work.
  std::vector<std::unique_ptr<TransportWork>> left_behind;
  std::shared_ptr<GroupState> checks;  // a group of the same ranks on which they compare calls; none: no need
};

struct GroupState {
  std::string name;
  int rank = 0;
  std::vector<int> world_ranks;  // by rank of the group
  std::shared_ptr<Transport> transport;
  std::shared_ptr<GroupProgress> progress;
  std::shared_ptr<WorldState> world;
  std::vector<std::shared_ptr<CallLog>> logs{};  // of a recorded handle
};

// Whether the group of this name is one on which ranks compare what they are about to call on another.
bool compares_calls(const std::string& group);
const std::shared_ptr<GroupState>& state_of(const Group& group);
// Makes the transport for these ranks. Collective over them.
std::shared_ptr<GroupState> make_group_state(std::shared_ptr<WorldState> world, std::string name,
                                             std::vector<int> world_ranks);

// Where the world asks for it and the transport does not do it: DisagreeError on all ranks that call different things.
void check_agreement(const std::shared_ptr<GroupState>& state, const Call& call);
// Checks the call and starts it: what every collective of Group comes down to. UsageError, CommError as there.
Work issue(const Group& group, Call call);

// Leaves a line in the flight recorder, if there is one.
void note(const Group& group, const std::string& text);

// Waits for `work`, which `call` describes, with the deadline and the errors of any other operation of the group.
void wait_for(const std::shared_ptr<GroupState>& group, Call call, std::unique_ptr<TransportWork> work);

class PendingWork {
 public:
  // `watch` has seen the call begin.
  PendingWork(std::shared_ptr<GroupState> group, Call call, CallWatch watch);
  ~PendingWork();
  // For work that is already under way; `call` describes it.
  PendingWork(std::shared_ptr<GroupState> group, Call call, std::unique_ptr<TransportWork> work);
  PendingWork(const PendingWork&) = delete;
  PendingWork& operator=(const PendingWork&) = delete;

  void wait();
  bool done();

 private:
  void wait_to_the_end();
  StuckWait stuck() const;
  // `why`: unless ranks have called different things, and one of them has ended because of that.
  [[noreturn]] void fail(int rank, const std::string& why);
  // Waits a moment for what is behind the transport's error to show.
  [[noreturn]] void fail_from(const std::exception& error);
  // `difference`: as all ranks say it.
  [[noreturn]] void disagree(const std::string& difference);

  std::shared_ptr<GroupState> group_;
  Call call_;
  CallWatch watch_;
  int64_t number_;
  uint64_t collective_ = 0;  // its number among the group's collectives
  bool published_ = false;   // peers do it on their own
  bool finished_ = false;
  std::unique_ptr<TransportWork> work_;
};

}  // namespace shoal
