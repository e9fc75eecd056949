#pragma once
// Resharding: the same checkpoint in files for another number of ranks.

#include <filesystem>

#include "checkpoint/loading/reader.h"

namespace shoal {

// Writes the checkpoint that `reader` has open to ROOT/step-N, in the files that `ranks` ranks would write: each rank's
// file of a part has the same number of bytes, up to one element. Names, values, order of elements, step and state do
// not change, nor does the number of ranks that the state belongs to, so that a training resumes from it exactly as
// from the original. Also converts safetensors files and Hugging Face folders to checkpoints. Returns ROOT/step-N.
//
// Bytes read are compared with their checksums, if there are any; bytes written are read once more before the
// checkpoint is published atomically. UsageError unless `root` is new or empty. After a CheckpointError nothing of the
// result is left. Memory: both indices and pieces of 1 MiB.
std::filesystem::path reshard(const CheckpointReader& reader, const std::filesystem::path& root, int ranks);

}  // namespace shoal
