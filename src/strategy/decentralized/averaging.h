#pragma once
// Collective operations on the buckets between steps: averages over all ranks.

#include <vector>

#include "strategy/decentralized/bucket.h"
#include "strategy/decentralized/mixing.h"

namespace shoal {

// Gives all ranks that are left the mean of their buckets, bit for bit the same, and shows it. Collective over them.
void average(Mixing& mixing, std::vector<GossipBucket>& buckets, const Label& label);
// The same before anything has been shown.
void average(const Group& group, std::vector<GossipBucket>& buckets, const Label& label);

// The mean over the ranks of |x_i - x|^2, where x is their mean. Collective over the ranks that are left.
double squared_distance(const Group& group, std::vector<GossipBucket>& buckets, const Label& label);

}  // namespace shoal
