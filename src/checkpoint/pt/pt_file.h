#pragma once
// Files of PyTorch's torch.save: a zip file with a pickle, and a record for the bytes of each storage.

#include <torch/types.h>

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/input_file.h"
#include "checkpoint/format/index.h"
#include "checkpoint/format/safetensors_format.h"

namespace shoal {

// A tensor in such a file.
struct PtTensor {
  at::ScalarType dtype;
  std::vector<int64_t> shape;
  std::vector<int64_t> order{};  // as StoredTensor has it
  int64_t offset = 0;            // bytes, in the file
  int64_t bytes = 0;
  std::optional<ChecksummedBytes> record{};  // with its storage; nothing: the writer left checksums out
};

// Tensors by name, see unpickle_tensors(). Trusts no byte: CheckpointError that names the file, and the tensor that
// lies beyond its storage, overlaps itself, or has gaps; or that the pickle does not have its checksum.
std::map<std::string, PtTensor> read_pt(const InputFile& file);

// Writes a state_dict that torch.load opens. Row-major tensors; those that are one tensor share their storage there.
// Memory: one tensor, where it is not row-major on the CPU. The file appears complete or not at all; of a symbolic
// link, its target. UsageError for a dtype that the format does not have, CheckpointError for file errors.
void save_pt(const std::filesystem::path& path, const std::vector<std::pair<std::string, at::Tensor>>& tensors);

}  // namespace shoal
