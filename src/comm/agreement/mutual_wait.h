#pragma once
// Detection of ranks that wait for each other in different groups, which no single group can see.

#include <optional>
#include <string>

#include "comm/group/group_state.h"

namespace shoal {

// One thread's wait for a collective. The rank posts in the store where it waits and what it has entered in every
// group, and reads the posts of its peers. If a peer waits in another group for this rank while this rank waits for the
// peer, neither call can complete. This is certain only if both ranks make their calls from one thread; otherwise
// nothing is reported. Throws what the store throws.
class MutualWait {
 public:
  // number: of the collective among those of its group.
  MutualWait(const GroupState& group, const Call& call, uint64_t number)
      : group_(group), call_(call), number_(number) {}

  void post() const;
  // Removes the post, when the wait is over.
  void withdraw() const;
  // A sentence that names the ranks, their groups and their operations, which is also published in the peer's group.
  // Nothing if there is no mutual wait (yet), or if the peer waits in a group in which this rank has called something
  // else before.
  std::optional<std::string> look() const;

 private:
  const GroupState& group_;
  const Call& call_;
  uint64_t number_;
};

}  // namespace shoal
