#pragma once
// Safetensors files that other programs wrote, described as a checkpoint of one part, without checksums.

#include <filesystem>

#include "checkpoint/format/index.h"

namespace shoal {

constexpr const char* plain_name = "model.safetensors";
constexpr const char* sharded_name = "model.safetensors.index.json";  // Hugging Face's

CheckpointIndex index_of_file(const std::filesystem::path& file);
// Of the sharded model whose index the folder holds: a "weight_map" from tensors to files of that folder.
CheckpointIndex index_of_sharded(const std::filesystem::path& folder);

}  // namespace shoal
