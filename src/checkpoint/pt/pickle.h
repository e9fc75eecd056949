#pragma once
// Pickles of tensors, as torch.save makes them.

#include <string>
#include <vector>

#include "checkpoint/pt/pickled_tensor.h"

namespace shoal {

// An OrderedDict of the tensors, in order. UsageError for a dtype that PyTorch has no storage for.
std::string pickle_tensors(const std::vector<PickledTensor>& tensors);

}  // namespace shoal
