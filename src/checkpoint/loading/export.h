#pragma once
// Export of a checkpoint's model to the formats of other programs.

#include <cstdint>
#include <filesystem>
#include <string>

#include "checkpoint/loading/reader.h"

namespace shoal {

// Writes one safetensors file with the whole tensors of a part, atomically. Memory: pieces.
void export_file(const CheckpointReader& reader, const std::filesystem::path& path, const std::string& part = "model");

// Writes the same as a .pt file, which Python's torch.load opens. Tied weights of a .pt file stay tied. Memory: the
// whole part.
void export_pt(const CheckpointReader& reader, const std::filesystem::path& path, const std::string& part = "model");

// Writes the form that Hugging Face's libraries open: model.safetensors or, if that would be larger than `shard_bytes`,
// files model-00001-of-00003.safetensors, filled in order of names, and finally model.safetensors.index.json. A larger
// tensor gets a file of its own. Creates the folder if necessary; it must not contain such a model.
void export_folder(const CheckpointReader& reader, const std::filesystem::path& folder,
                   int64_t shard_bytes = 5'000'000'000, const std::string& part = "model");

}  // namespace shoal
