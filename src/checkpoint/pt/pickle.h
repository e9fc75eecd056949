#pragma once
// Pickles of tensors, as torch.save makes them: reading without running anything, and writing.

#include <torch/types.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace shoal {

// A tensor on a storage that lies in a record of its own.
struct PickledTensor {
  std::string name;
  std::string storage;  // key
  at::ScalarType dtype = at::kFloat;
  int64_t offset = 0;  // elements
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;  // elements
};

// The tensors in the dictionary or list that the pickle holds; those of dictionaries and lists in it have names like
// "model.fc.weight". Other values are left out. CheckpointError that begins with `subject` for anything that would make
// a Python object, what is not a pickle, sizes below zero, more than a million values, or nesting deeper than 64.
std::vector<PickledTensor> unpickle_tensors(std::string_view pickle, const std::string& subject);

// An OrderedDict of the tensors, in order. UsageError for a dtype that PyTorch has no storage for.
std::string pickle_tensors(const std::vector<PickledTensor>& tensors);

}  // namespace shoal
