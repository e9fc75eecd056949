#pragma once
// Ranks of a group that have called different things under one number, where the transport does not see that.

#include <optional>
#include <string>
#include <vector>

#include "comm/group/group_state.h"

namespace shoal {

// Ranks that wait, or whose transport has failed, show each other their last calls through the store, by the rule of
// find_difference. The first sentence that anybody finds is what all ranks say, those too that come later or that have
// called nothing since. All of this is for the few who are in trouble: nothing here is called while all is well. Throws
// what the store throws.
class Disagreement {
 public:
  // number: of the collective that this rank waits for or has failed in.
  Disagreement(const GroupState& group, uint64_t number) : group_(group), number_(number) {}

  // What has been found already.
  std::optional<std::string> told() const;
  // Shows this rank's last calls and compares all that it remembers with what up to 63 peers have shown, the ones that
  // follow it in the group: any two camps have a border. While some of them have shown nothing, what is found is told
  // the second time only, so that it names the first ranks if they come.
  std::optional<std::string> look();
  // All ranks will say `sentence`, unless another one was first: returns what they say.
  std::string tell(const std::string& sentence) const;

  // The same for another group than the one of the wait.
  static std::string tell(const WorldState& world, const std::string& group, const std::string& sentence);
  // For a rank that waits in another group: whether it and `world_rank`, which waits in the group of this name, have
  // called different things there; tells that group so.
  static std::optional<std::string> look(const WorldState& world, const std::string& group, int world_rank);

 private:
  const GroupState& group_;
  uint64_t number_;
  bool found_ = false;
};

}  // namespace shoal
