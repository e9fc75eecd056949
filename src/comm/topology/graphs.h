#pragma once
// Built-in topologies. docs/topologies.md describes them for sizes that their origin does not cover.

#include <vector>

#include "shoal/topology.h"

namespace shoal {

using Rounds = std::vector<RoundSpec>;

// decent-dp's graphs, for any size. Doubly stochastic.
Rounds complete(int size);
Rounds ring(int size);
Rounds one_peer_exp(int size);
// hosts: number of ranks on each host.
Rounds alternating_exp_ring(const std::vector<int>& hosts);

// Static graphs, with Metropolis weights; the exponential one is directed, with equal weights.
Rounds exponential(int size);
Rounds torus(int size);
Rounds grid(int size);
Rounds hypercube(int size);
Rounds star(int size);

// Matchings: every rank has at most one peer in a round.
Rounds random_matchings(int size, uint64_t seed);
Rounds base_2(int size);

}  // namespace shoal
