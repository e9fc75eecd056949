#pragma once
// Detection, through the store, of different calls that ranks of a group made under the same number.

#include <optional>
#include <string>
#include <vector>

#include "comm/group/group_state.h"

namespace shoal {

// Used where the transport does not compare calls. Ranks that wait, or whose transport has failed, publish their last
// calls in the store and compare them by the rule of find_difference. All ranks report the first sentence that any of
// them finds, including those that arrive later or have called nothing since. Costs nothing while all is well. Throws
// what the store throws.
class Disagreement {
 public:
  // number: of the collective that this rank waits for or has failed in.
  Disagreement(const GroupState& group, uint64_t number) : group_(group), number_(number) {}

  // A sentence that was published already.
  std::optional<std::string> told() const;
  // Publishes this rank's last calls and compares all that it remembers with the calls of up to 63 peers, those that
  // follow it in the group: wherever ranks differ, two neighbours do. While some of these peers have published nothing,
  // a difference is reported only when found a second time, so that the sentence names the first ranks if they come.
  std::optional<std::string> look();
  // Publishes `sentence` unless there is one already; returns the one that all ranks report.
  std::string tell(const std::string& sentence) const;

  // The same for another group.
  static std::string tell(const WorldState& world, const std::string& group, const std::string& sentence);
  // For a rank that waits in another group: whether it and `world_rank`, which waits in the group of this name, have
  // called different things there. Publishes the sentence in that group.
  static std::optional<std::string> look(const WorldState& world, const std::string& group, int world_rank);

 private:
  const GroupState& group_;
  uint64_t number_;
  bool found_ = false;
};

}  // namespace shoal
