#pragma once
// Checks of what `shoal train` writes, before it begins: a wrong path must not cost a night's training.

#include "cli/train/train_options.h"
#include "shoal/group.h"

namespace shoal::cli {

// UsageError, which names the option, if a file or folder that rank 0 writes cannot be written, or would replace what
// the training reads or what else it writes. Makes the folders.
void check_outputs(const TrainOptions& options);
// The same, and whether each rank can write to the folders into which all do. An error is that of all ranks.
// Collective, unless ranks train independently.
void check_outputs(const TrainOptions& options, const Group& group);

}  // namespace shoal::cli
