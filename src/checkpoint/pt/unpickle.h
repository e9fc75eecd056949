#pragma once
// Tensors of pickles that torch.save has made, read without running anything.

#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/pt/pickled_tensor.h"

namespace shoal {

// The tensors in the dictionary or list that the pickle holds; those of dictionaries and lists in it have names like
// "model.fc.weight". Other values are left out. CheckpointError that begins with `subject` for anything that would make
// a Python object, what is not a pickle, sizes below zero, more than a million values, nesting deeper than 64, objects
// or storages with names of more than 256 bytes, more than 64 dimensions, and lazy conjugates or negatives.
std::vector<PickledTensor> unpickle_tensors(std::string_view pickle, const std::string& subject);

}  // namespace shoal
