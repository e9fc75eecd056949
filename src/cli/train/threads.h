#pragma once
// Compute threads of the ranks of `shoal train`.

#include "cli/train/train_options.h"
#include "shoal/world.h"

namespace shoal::cli {

// Of each of several ranks that this process starts on its processors. 0: OMP_NUM_THREADS decides, which torchrun and
// users set.
int threads_per_rank(const TrainOptions& options, int ranks);

// Sets those of this rank: --threads, OMP_NUM_THREADS, or its share of the processors, of which mpirun and srun may
// have given it some of its own. Rank 0 warns of more threads than its share. Not collective.
void set_threads(const TrainOptions& options, const World& world);

}  // namespace shoal::cli
