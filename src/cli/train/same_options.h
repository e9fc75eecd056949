#pragma once
// Ranks of `shoal train` that other programs than shoal start may have command lines of their own.

#include "cli/train/feed.h"
#include "cli/train/train_options.h"
#include "shoal/group.h"

namespace shoal::cli {

// DisagreeError on every rank, with the first one that differs, if the ranks' options are not those of one training.
// What may differ is not compared: paths, --batch (but for the steps of an epoch, where these count), --threads,
// --device, how long a rank waits, and what rank 0 writes. feed: of the training data. Collective.
void require_same_options(const TrainOptions& options, const Feed& feed, const Group& group);

}  // namespace shoal::cli
