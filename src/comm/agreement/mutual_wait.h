#pragma once
// Ranks that wait for each other in different groups, which no group can see by itself.

#include <optional>
#include <string>

#include "comm/group/group_state.h"

namespace shoal {

// One thread's wait for a collective. The rank tells the store where it waits and what it has entered in every group,
// and reads the same of its peers: if one of them waits in another group for this rank, while this rank waits for it,
// neither will ever come. That is certain where each of the two calls from one thread only; elsewhere nothing is said.
// Throws what the store throws.
class MutualWait {
 public:
  // number: of the collective among those of its group.
  MutualWait(const GroupState& group, const Call& call, uint64_t number)
      : group_(group), call_(call), number_(number) {}

  void post() const;
  // The wait is over.
  void withdraw() const;
  // A sentence that names the ranks, their groups and their operations, also to the group that the other one waits in;
  // none: not, or not yet. So too where a peer waits in a group in which this rank has called something else before.
  std::optional<std::string> look() const;

 private:
  const GroupState& group_;
  const Call& call_;
  uint64_t number_;
};

}  // namespace shoal
