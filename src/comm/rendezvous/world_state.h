#pragma once
// State shared by all groups of a process.

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/agreement/activity.h"
#include "comm/group/released_groups.h"
#include "comm/membership/board.h"
#include "comm/membership/join_table.h"
#include "comm/rendezvous/liveness.h"
#include "comm/rendezvous/rendezvous.h"
#include "comm/telemetry/flight_recorder.h"
#include "shoal/world.h"

namespace shoal {

class Progress;
struct GroupProgress;

// All groups of a world. Thread-safe.
class GroupList {
 public:
  void add(const std::shared_ptr<GroupProgress>& group) {
    const std::lock_guard lock(mutex_);
    std::erase_if(groups_, [](const auto& one) { return one.expired(); });
    groups_.push_back(group);
  }
  std::vector<std::shared_ptr<GroupProgress>> living() const {
    const std::lock_guard lock(mutex_);
    std::vector<std::shared_ptr<GroupProgress>> list;
    for (const auto& group : groups_) {
      if (auto living = group.lock()) list.push_back(std::move(living));
    }
    return list;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::weak_ptr<GroupProgress>> groups_;
};

struct WorldState {
  // A forked child has the parent's groups, but neither its threads nor its place in the job.
  bool is_forked_copy() const { return getpid() != pid; }
  std::chrono::milliseconds rendezvous_limit() const {
    return std::chrono::seconds(options.rendezvous_timeout_seconds);
  }

  const int pid = getpid();
  WorldOptions options;
  Placement placement;
  Meeting meeting;
  std::unique_ptr<Liveness> liveness;
  std::shared_ptr<shm::HostMemory> memory;   // nullptr if the system provides no shared memory
  std::string listen_address;                // address of this process's own sockets
  std::unique_ptr<FlightRecorder> recorder;  // nullptr if not configured
  Activity activity;
  std::shared_ptr<ReleasedGroups> released_groups = std::make_shared<ReleasedGroups>();
  std::shared_ptr<Progress> progress;  // of c10d backends; nullptr until one is made
  GroupList groups;
  std::shared_ptr<GenerationWatch> watch;  // of an elastic job; nullptr: a rank's failure ends the job
  JoinPlace join{};                        // of an elastic job
  std::atomic<bool> withheld = false;      // a newcomer's loop has not begun, where the other ranks communicate next
  int local_rank = 0;
  int local_size = 1;
};

// What all copies of a World refer to. An elastic job replaces its content after a rank has ended.
struct WorldCell {
  std::shared_ptr<WorldState> state;
  Group group;
};

const std::shared_ptr<WorldCell>& cell_of(const World& world);
// Numbers the ranks of this host.
void count_local_ranks(WorldState& state);
// The group of all ranks. Collective.
Group make_world_group(const std::shared_ptr<WorldState>& state);

}  // namespace shoal
