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
  int port = 0;                  // of the store; 0: the program gave a store, and `address` describes it
  bool store_is_served = false;  // a launcher hosts the store; rank 0 must not
  std::string generation = "0";  // counts a launcher's restarts of the job
  std::string source;            // names the source in messages
  std::string reached;           // numeric address at which this process reaches the store; empty: unknown
  JobIdentity job;               // name: the same on all ranks, different in other jobs; empty: unknown
};

// Name of the store in messages.
std::string store_name(const Placement& placement);

// UsageError if RANK=0 and WORLD_SIZE=1 say that this rank is alone, and another launcher's variables that it is one of
// several.
void refuse_contradiction(const Environment& environment);

// Whether this is Slurm's batch script for one node, which is no task: find_placement() refuses it where it is for
// several tasks.
bool in_batch_script_of_one_node(const Environment& environment);

// Order: options, RANK/WORLD_SIZE, Open MPI, PMI, Slurm, alone. UsageError for an incomplete or inconsistent set.
Placement find_placement(const WorldOptions& options, const Environment& environment);

}  // namespace shoal
