#pragma once
// Rendezvous: all ranks of a job meet in the store and exchange their identities.

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/rendezvous/host.h"
#include "comm/rendezvous/launch_environment.h"
#include "comm/shm/host_memory.h"
#include "comm/store/store.h"
#include "comm/store/store_server.h"

namespace shoal {

struct Peer {
  std::string host;  // host_identity()
  ProcessId process;
  shm::PageAddress page;  // address of its shared memory; descriptor -1: it has none
  std::string gpus{};     // visible_gpus(), if they decide on the transport
  std::string store{};    // Placement::reached
};

struct Meeting {
  std::unique_ptr<StoreServer> server;  // on rank 0, unless a launcher serves the store
  StorePtr store;                       // nullptr if the process is alone
  std::function<StorePtr()> launcher;   // gives the store to which the launcher of these ranks writes; empty: none does
  std::string prefix;                   // of this meeting's keys
  std::string failure_key;              // of the first failure that any rank noticed
  std::vector<Peer> peers;              // by world rank
};

// Collective over the job. Throws as shoal::init does. page, gpus: of this process, for the others. options: for the
// limit of the wait, and what to call meanwhile.
Meeting meet(Placement placement, const shm::PageAddress& page, const std::string& gpus, const WorldOptions& options);
// As meet(), in a store that the program gave. launcher: see Meeting.
Meeting meet_in(const StorePtr& store, std::function<StorePtr()> launcher, const Placement& placement,
                const shm::PageAddress& page, const std::string& gpus, const WorldOptions& options);
// Replaces a dead process in a job whose ranks have already met. Throws as shoal::init does.
Meeting meet_again(Placement placement, const shm::PageAddress& page, const std::string& gpus,
                   const WorldOptions& options);
// The process that now has a rank's place, if the store knows.
std::optional<Peer> present_peer(const Meeting& meeting, int rank);

}  // namespace shoal
