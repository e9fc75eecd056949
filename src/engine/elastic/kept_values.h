#pragma once
// Values of shards that are set aside while others take their place.

#include "engine/elastic/held_state.h"
#include "shoal/group.h"

namespace shoal {

// In memory that the ranks of a host share, so that a rank which ends does not take its values along.
class KeptValues {
 public:
  // targets: what each rank of the group updates. Collective.
  KeptValues(const Group& group, UpdateTargets targets);

  // Sets this rank's values aside. They may change from now on.
  void keep(int rank);
  // Puts a rank's values back, if they are set aside. If the rank has ended, others may do so, all at once as well.
  void put_back(int rank);
  void put_all_back();

 private:
  std::byte* at(int64_t offset) const;
  // Calls `copy` with the rank's values and the memory that is kept for them, both in memory order.
  template <class Copy>
  void for_each(int rank, const Copy& copy) const;

  UpdateTargets targets_;
  std::vector<int64_t> places_{};  // by rank: a word that says whether its values are set aside; they follow
  at::Tensor memory_{};
};

}  // namespace shoal
