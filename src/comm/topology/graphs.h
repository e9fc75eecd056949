#pragma once
// The built-in graphs. docs/topologies.md says what each is for sizes that its origin does not have.

#include <vector>

#include "shoal/topology.h"

namespace shoal {

using Rounds = std::vector<RoundSpec>;

// decent-dp's, for any size. Doubly stochastic.
Rounds complete(int size);
Rounds ring(int size);
Rounds one_peer_exp(int size);
// Of hosts with so many ranks each.
Rounds alternating_exp_ring(const std::vector<int>& hosts);

// Graphs that do not change, with Metropolis weights; the exponential one is directed, with equal weights.
Rounds exponential(int size);
Rounds torus(int size);
Rounds grid(int size);
Rounds hypercube(int size);
Rounds star(int size);

// Matchings: every rank has at most one peer in a round.
Rounds random_matchings(int size, uint64_t seed);
Rounds base_2(int size);

}  // namespace shoal
