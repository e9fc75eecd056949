#pragma once
// Assignment of whole parameters to owning ranks.

#include <torch/types.h>

#include <cstdint>
#include <vector>

#include "layout/flat_layout.h"

namespace shoal {

// Gives every parameter without owner (-1) to the rank that has the fewest elements so far, in the order in which
// backward delivers gradients, last first; the other owners stay. So no two ranks differ by more than the largest
// parameter, and gradients for every rank become ready all along.
void assign_owners(const std::vector<at::Tensor>& parameters, int ranks, std::vector<int>& owners);

// Moves parameters from the ranks with most elements to those with fewest until no two ranks differ by more than the
// largest parameter, and no more of them. Every one has an owner.
void balance_owners(const std::vector<at::Tensor>& parameters, int ranks, std::vector<int>& owners);

// Flat memory for parameters of one dtype and device, each rank's together.
struct OwnedBuffer {
  std::vector<size_t> members;  // numbers of the parameters, in the order in which they lie
  FlatLayout layout;
  std::vector<Range> ranges;  // by rank
};

std::vector<OwnedBuffer> owned_buffers(const std::vector<at::Tensor>& parameters, const std::vector<int>& owners,
                                       int ranks);

}  // namespace shoal
