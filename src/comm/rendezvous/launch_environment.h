#pragma once
// Rank, size and address of this process, from explicit options or from the environment variables of exactly one
// launcher.

#include <string>

#include "base/environment.h"
#include "comm/rendezvous/job_identity.h"
#include "shoal/world.h"

namespace shoal {

struct Placement {
  int rank = 0;
  int size = 1;
  std::string address;           // of the store
  int port = 0;                  // of the store
  bool store_is_served = false;  // a launcher hosts the store; rank 0 must not
  std::string generation = "0";  // counts a launcher's restarts of the job
  std::string source;            // for messages
  JobIdentity job;               // its name: the same on all ranks, another one in other jobs; empty: unknown
};

// Order: options, RANK/WORLD_SIZE, Open MPI, PMI, Slurm, alone. Throws UsageError for a partial or nonsensical set.
Placement find_placement(const WorldOptions& options, const Environment& environment);

}  // namespace shoal
