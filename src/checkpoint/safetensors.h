#pragma once
// Writing tensors in the safetensors format, which Python opens as it is.

#include <torch/types.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

namespace shoal {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

// Writes the tensors, in row-major order whatever their layout, to a file at `path`. The file appears whole or not at
// all: it is written under another name beside it, synced and renamed; an older file stays until then. Names must be
// different and not "__metadata__". Throws UsageError that names the file and the system's reason (no permission, disk
// full) or the tensor whose dtype the format lacks. collective: no.
void save_safetensors(const std::string& path, const NamedTensors& tensors,
                      const std::map<std::string, std::string>& metadata);

}  // namespace shoal
