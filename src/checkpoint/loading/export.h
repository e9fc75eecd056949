#pragma once
// A checkpoint's model in the forms that other programs read.

#include <cstdint>
#include <filesystem>
#include <string>

#include "checkpoint/loading/reader.h"

namespace shoal {

// One safetensors file with the whole tensors of a part. It appears complete or not at all. Memory: pieces.
void export_file(const CheckpointReader& reader, const std::filesystem::path& path, const std::string& part = "model");

// What Hugging Face's libraries open: model.safetensors, or, where it would be larger than `shard_bytes`, files
// model-00001-of-00003.safetensors, filled in order of names, and model.safetensors.index.json, which comes last. A
// tensor larger than that has a file of its own. The folder is made if need be; it must hold no such model.
void export_folder(const CheckpointReader& reader, const std::filesystem::path& folder,
                   int64_t shard_bytes = 5'000'000'000, const std::string& part = "model");

}  // namespace shoal
