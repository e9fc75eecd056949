#pragma once
// Reader of everything in a checkpoint, for fuzzing.

#include "checkpoint/loading/reader.h"
#include "shoal/error.h"

namespace shoal::test {

// A CheckpointError counts as success; other exceptions pass through.
inline void read_all(const std::filesystem::path& path) {
  try {
    const CheckpointReader reader(path, /*verify=*/false);  // no mutation would find the values' checksums
    for (const auto& [name, tensor] : reader.index().tensors) {
      if (tensor.dtype != at::ScalarType::Undefined) reader.read(name);
    }
  } catch (const CheckpointError&) {
  }
}

}  // namespace shoal::test
