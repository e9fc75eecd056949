#pragma once
// Collective operations on buckets between steps: averages over all ranks.

#include <vector>

#include "strategy/decentralized/bucket.h"
#include "strategy/decentralized/mixing.h"

namespace shoal {

// Gives all remaining ranks the mean of their buckets, bit for bit the same, and shows it. Collective over them.
void average(Mixing& mixing, std::vector<GossipBucket>& buckets, const Label& label);
// The same before any rank has shown values.
void average(const Group& group, std::vector<GossipBucket>& buckets, const Label& label);

// The mean over ranks of |x_i - x|^2, where x is the ranks' mean. Collective over the remaining ranks.
double squared_distance(const Group& group, std::vector<GossipBucket>& buckets, const Label& label);

}  // namespace shoal
