#pragma once
// Ranks that wait for each other in different groups, which no group can see by itself.

#include <chrono>
#include <optional>
#include <string>

#include "comm/group_state.h"

namespace shoal {

// One thread's wait for a collective. When it has taken a while, the rank tells the store where it waits and what it
// has entered in every group, and reads the same of its peers: if one of them waits in another group for this rank,
// while this rank waits for it, neither will ever come. That is certain where each of the two calls from one thread
// only; elsewhere nothing is said. Costs nothing before half a second has passed.
class MutualWait {
 public:
  // number: of the collective among those of its group.
  MutualWait(const GroupState& group, const Call& call, uint64_t number);

  // A sentence that names the ranks, their groups and their operations; none: not, or not yet.
  std::optional<std::string> look();

 private:
  using Clock = std::chrono::steady_clock;

  void post() const;

  const GroupState& group_;
  const Call& call_;
  uint64_t number_;
  bool posted_ = false;
  Clock::time_point next_;
};

}  // namespace shoal
