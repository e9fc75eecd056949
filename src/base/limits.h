#pragma once
// Bounds for numbers that come from outside.

namespace shoal {

// Ranks of a job: more than any machine has, few enough that a table of them all is small.
constexpr int max_ranks = 100'000;

}  // namespace shoal
