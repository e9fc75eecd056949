#pragma once
// Environment variables by which a rank finds its place in the job, as torchrun names them.

#include <string>

#include "base/environment.h"
#include "launch/child.h"
#include "launch/launcher.h"
#include "launch/newcomers.h"

namespace shoal {

struct RankPlace {
  int rank = 0;
  int local = 0;        // on this host
  int first_ranks = 0;  // of all hosts
};

struct JobNames {
  std::string run{};     // the same on all nodes
  std::string id{};      // of this launcher
  std::string secret{};  // empty: none
  int port = 0;          // of the store
};

// Whether OMP_NUM_THREADS says how many threads a rank has: a whole number above 0. OpenMP ignores what is none.
bool has_openmp_threads(const Environment& environment);

Variables rank_variables(const LaunchOptions& options, const RankPlace& place, const JobNames& job,
                         const Newcomers& newcomers);

}  // namespace shoal
