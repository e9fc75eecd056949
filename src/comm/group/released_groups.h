#pragma once
// Groups that this rank is done with and others perhaps not.

#include <memory>
#include <mutex>
#include <vector>

#include "comm/store/store.h"
#include "comm/transport/transport.h"

namespace shoal {

// A rank that lets go of a group may be ahead of others that still wait in it, and closing its connections would fail
// them. So they are kept until all ranks have let go, which is looked up in the store when another group is made; at
// the end of the process the system closes what is left, after all that was sent. Thread-safe.
class ReleasedGroups {
 public:
  ~ReleasedGroups();

  // `store`: of this group alone, of which this is `rank`.
  void keep(std::shared_ptr<Transport> transport, c10::intrusive_ptr<c10d::Store> store, int rank, int ranks);
  // aside: on a thread of its own, since one of them may have a thread that never ends. Throws what the store throws.
  void end_unreferenced(bool aside);

 private:
  struct Group {
    std::shared_ptr<Transport> transport;
    c10::intrusive_ptr<c10d::Store> store;
    int rank;
    int ranks;
    bool said = false;  // that this rank has let go
    bool unreferenced = false;
  };

  std::mutex mutex_;
  std::vector<Group> groups_;
};

}  // namespace shoal
