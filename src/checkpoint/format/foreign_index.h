#pragma once
// Index of safetensors and .pt files from other programs, as a checkpoint of one part without checksums.

#include <filesystem>

#include "checkpoint/format/index.h"

namespace shoal {

constexpr const char* plain_name = "model.safetensors";
constexpr const char* sharded_name = "model.safetensors.index.json";  // Hugging Face's name

CheckpointIndex index_of_file(const std::filesystem::path& file);
// Index of the sharded model in a folder, from its "weight_map", which maps tensors to files of that folder.
CheckpointIndex index_of_sharded(const std::filesystem::path& folder);

}  // namespace shoal
