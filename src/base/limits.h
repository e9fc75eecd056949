#pragma once
// Limits for numbers from outside.

namespace shoal {

// Ranks of a job: more than any machine has, few enough for a table of all ranks to be small.
constexpr int max_ranks = 100'000;
// Compute threads of a rank: more than the cores of any machine.
constexpr int max_threads = 1024;

}  // namespace shoal
