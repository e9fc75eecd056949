#pragma once
// Environment variables by which a rank finds its place in the job, as torchrun names them.

#include <string>

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

Variables rank_variables(const LaunchOptions& options, const RankPlace& place, const JobNames& job,
                         const Newcomers& newcomers);

}  // namespace shoal
