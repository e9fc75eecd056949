#pragma once
// Values of parameters that others than the engine have changed, and whether all ranks have the same.

#include <torch/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "shoal/group.h"

namespace shoal {

struct ChangedValue {
  std::string name;  // of the parameter
  uint64_t digest;   // of its values
  bool frozen = false;
};

// A number that stands for a tensor's dtype and the bits of its elements in row-major order. Reads the tensor once.
uint64_t digest_of(const at::Tensor& tensor);

// DisagreeError that names the first parameter which ranks have not changed alike, with what to do. Collective.
void agree_on_values(const Group& group, const std::vector<ChangedValue>& values);
// agree() under another name in the error of ranks that call something else, of at most 95 characters. Collective.
void agree_as(const std::string& call, const Group& group, const std::string& subject,
              const std::vector<std::string>& items);

}  // namespace shoal
