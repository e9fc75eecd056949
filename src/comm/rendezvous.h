#pragma once
// All ranks of a job meet in the store and tell each other who they are.

#include <memory>
#include <string>
#include <vector>

#include "comm/host.h"
#include "comm/launch_environment.h"
#include "comm/store.h"
#include "comm/store_server.h"

namespace shoal {

struct Peer {
  std::string host;  // host_identity()
  ProcessId process;
};

struct Meeting {
  std::unique_ptr<StoreServer> server;  // on rank 0, unless a launcher serves the store
  StorePtr store;                       // none when the process is alone
  std::string prefix;                   // of this meeting's keys
  std::vector<Peer> peers;              // by world rank
};

// Collective over the job. Throws as shoal::init does.
Meeting meet(const Placement& placement, int timeout_seconds);

}  // namespace shoal
