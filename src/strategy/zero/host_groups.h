#pragma once
// Groups of ShardedDataParallel: the ranks of its OSS own shares, and with an OSS over by_host() each host has all of
// them.

#include <memory>

#include "engine/sharded/shard_groups.h"
#include "shoal/zero.h"

namespace shoal {

// The groups of a wrapper over `group`. UsageError for an OSS over other ranks than those of the group or of this
// rank's host; DisagreeError if ranks differ. Collective.
ShardGroups groups_of(const std::vector<OSSCore*>& optimizers, const Group& group);

// Sums each gradient to its owner's rank. owners: rank in the shard group, by gradient.
std::unique_ptr<GradientReduction> reduce_to_owners(const ShardGroups& groups, const BucketCaps& caps,
                                                    const std::vector<int>& owners);

}  // namespace shoal
