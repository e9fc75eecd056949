#pragma once
// Norm of gradients whose pieces lie on different ranks.

#include <vector>

#include "shoal/group.h"

namespace shoal {

// Norm of all ranks' tensors taken as one vector; each element must be on exactly one rank. norm_type: any number;
// infinity for the largest absolute value, minus infinity for the smallest, 0 for the number of tensors; UsageError for
// NaN. 0 without any tensor. Sums in float64, so that the result does not depend (at float32's precision) on how ranks
// share the elements. Collective.
double global_norm(const std::vector<at::Tensor>& gradients, double norm_type, const Group& group, const Label& label);
// The same over several groups: sums over the first, then over the next, and so on.
double global_norm(const std::vector<at::Tensor>& gradients, double norm_type, const std::vector<Group>& groups,
                   const Label& label);
// The same norm, with the same rounding, of gradients that are all on this rank.
double local_norm(const std::vector<at::Tensor>& gradients, double norm_type);

// Scales gradients of norm `norm` in place so that their norm is at most `max_norm` (torch's clip_grad_norm_).
void clip_to_norm(const std::vector<at::Tensor>& gradients, double norm, double max_norm);

}  // namespace shoal
