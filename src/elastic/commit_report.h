#pragma once
// Report of a rank in the commit of a step, which all ranks compare.

#include <vector>

#include "shoal/group.h"

namespace shoal {

// The greatest and the least of a number that each rank has.
struct Extent {
  explicit Extent(double own) : most(own), minus_least(-own) {}
  double least() const { return -minus_least; }
  bool differs() const { return most != -minus_least; }

  double most;
  double minus_least;
};

// Of one rank, or of all.
struct CommitReport {
  Extent samples;                  // of a share in the step
  Extent steps;                    // complete ones
  Extent pass;                     // EpochPosition::pass
  Extent epoch;                    // the sampler's
  bool map = false;                // ranks must map memory of others before they update
  bool earlier_gradients = false;  // compute has added to some
  bool join_requested = false;     // processes ask to join
  std::vector<double> dropped{};   // by rank: DroppedSteps::count()
  std::vector<double> compared{};  // Comparison::values(), where ranks have joined

  // Of all ranks. Collective.
  CommitReport of_all(const Group& group, const Label& label) const;
};

}  // namespace shoal
