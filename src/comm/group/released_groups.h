#pragma once
// Groups that this rank has released and other ranks may still use.

#include <memory>
#include <mutex>
#include <vector>

#include "comm/store/store.h"
#include "comm/transport/transport.h"

namespace shoal {

// Keeps the transports of released groups alive until all ranks have released them. A rank that releases a group may be
// ahead of ranks that still wait in it, and closing its connections would fail those. Releases are looked up in the
// store when another group is created. At the end of the process the system closes the remaining connections, after all
// data were sent. Thread-safe.
class ReleasedGroups {
 public:
  ~ReleasedGroups();

  // `store`: a store of this group alone, in which this process is `rank`.
  void keep(std::shared_ptr<Transport> transport, c10::intrusive_ptr<c10d::Store> store, int rank, int ranks);
  // Ends the groups that no rank references any more. aside: on a separate thread, because one of them may have a
  // thread that never ends. Throws what the store throws.
  void end_unreferenced(bool aside);

 private:
  struct Group {
    std::shared_ptr<Transport> transport;
    c10::intrusive_ptr<c10d::Store> store;
    int rank;
    int ranks;
    bool said = false;  // this rank's release is in the store
    bool unreferenced = false;
  };

  std::mutex mutex_;
  std::vector<Group> groups_;
};

// Destroys it on a separate thread, because it may have threads that end late or never.
void end_aside(std::shared_ptr<Transport> transport);

}  // namespace shoal
