#pragma once
// Memory that several parameters have in common, which wrappers that give parameters other memory cannot keep.

#include <torch/types.h>

#include <string>
#include <vector>

#include "module/walk.h"

namespace shoal {

// UsageError if a parameter has memory in common with another or a buffer, as one of the two would be left behind.
// wrapper: for the error. Not collective: ranks have the same module.
void require_separate_memory(const std::vector<NamedTensor>& parameters, const std::vector<NamedTensor>& buffers,
                             const std::string& wrapper);

// Call before the values of `replaced`, which have other memory since they were wrapped (set_data), are agreed on and
// adopted. Where that memory is a strategy's, such as another parameter's, they get a copy, since an adoption
// overwrites it. UsageError if two of all `parameters` are on the same memory. owner: of the strategy, for errors.
void separate(const std::vector<NamedTensor>& parameters, const std::vector<at::Tensor>& replaced,
              const std::string& owner);

}  // namespace shoal
