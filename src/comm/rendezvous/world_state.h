#pragma once
// State shared by all groups of a process.

#include <unistd.h>

#include <memory>
#include <string>

#include "comm/agreement/activity.h"
#include "comm/group/released_groups.h"
#include "comm/rendezvous/liveness.h"
#include "comm/rendezvous/rendezvous.h"
#include "comm/telemetry/flight_recorder.h"
#include "shoal/world.h"

namespace shoal {

class Progress;

struct WorldState {
  // A forked child has the parent's groups, but neither its threads nor its place in the job.
  bool is_forked_copy() const { return getpid() != pid; }

  const int pid = getpid();
  WorldOptions options;
  Placement placement;
  Meeting meeting;
  std::unique_ptr<Liveness> liveness;
  std::shared_ptr<HostMemory> memory;        // nullptr if the system provides no shared memory
  std::string listen_address;                // address of this process's own sockets
  std::unique_ptr<FlightRecorder> recorder;  // nullptr if not configured
  Activity activity;
  std::shared_ptr<ReleasedGroups> released_groups = std::make_shared<ReleasedGroups>();
  std::shared_ptr<Progress> progress;  // of c10d backends; nullptr until one is made
  int local_rank = 0;
  int local_size = 1;
};

}  // namespace shoal
