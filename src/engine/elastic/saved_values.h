#pragma once
// Copies of shards, from which they are restored after others have taken their place.

#include "engine/elastic/held_state.h"
#include "shoal/group.h"

namespace shoal {

// In memory that the ranks of a host share, so that a rank which ends does not take its values along.
class SavedValues {
 public:
  // targets: what each rank of the group updates. Collective.
  SavedValues(const Group& group, UpdateTargets targets);

  // Saves this rank's values. They may change from now on.
  void save(int rank);
  // Restores a rank's values, if they are saved. If the rank has ended, others may do so, all at once as well.
  void restore(int rank);
  void restore_all();

 private:
  std::byte* at(int64_t offset) const;
  // Calls `copy` with the rank's values and the memory that is kept for them, both in memory order.
  template <class Copy>
  void for_each(int rank, const Copy& copy) const;

  UpdateTargets targets_;
  std::vector<int64_t> places_{};  // by rank: a word that says whether its values are saved; they follow
  at::Tensor memory_{};
};

}  // namespace shoal
