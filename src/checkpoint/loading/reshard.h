#pragma once
// The same checkpoint in other files.

#include <filesystem>

#include "checkpoint/loading/reader.h"

namespace shoal {

// Writes what `reader` has open to ROOT/step-N, in the files that `ranks` ranks would write: of every part each rank
// has the same number of bytes, up to one element. Names, values, the order of elements, step and state stay as they
// are, and so does the number of ranks that the state belongs to, so that one resumes from it exactly as from the
// original. Safetensors files and folders of Hugging Face's become checkpoints that way. Returns ROOT/step-N.
//
// Whatever is read is compared with its checksums, if it has any, and whatever was written is read once more before it
// appears under its name, in one step. `root` must be new or empty: UsageError. CheckpointErrors leave nothing of it
// there. Memory: both indices and pieces of 1 MiB.
std::filesystem::path reshard(const CheckpointReader& reader, const std::filesystem::path& root, int ranks);

}  // namespace shoal
