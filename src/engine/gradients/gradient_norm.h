#pragma once
// The norm of gradients whose pieces lie on different ranks.

#include <vector>

#include "shoal/group.h"

namespace shoal {

// Norm over all ranks' tensors taken as one vector; each element must be on one rank only. norm_type: any number but 0;
// infinity for the largest absolute value, minus infinity for the smallest; UsageError otherwise. 0 without any tensor.
// Sums in float64, so that the result does not depend on how the elements are spread over ranks, to float32's
// precision. Collective.
double global_norm(const std::vector<at::Tensor>& gradients, double norm_type, const Group& group, const Label& label);
// Over the ranks of several groups: sums over the first, then sums of these over the next.
double global_norm(const std::vector<at::Tensor>& gradients, double norm_type, const std::vector<Group>& groups,
                   const Label& label);
// The same norm of gradients that are all here, with the same rounding.
double local_norm(const std::vector<at::Tensor>& gradients, double norm_type);

// Scales gradients of norm `norm` in place so that it becomes at most `max_norm` (torch's clip_grad_norm_).
void clip_to_norm(const std::vector<at::Tensor>& gradients, double norm, double max_norm);

}  // namespace shoal
