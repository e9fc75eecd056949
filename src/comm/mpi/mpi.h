#pragma once

#include <memory>
#include <vector>

#include "comm/transport/transport.h"

namespace shoal {

struct WorldState;

// Whether this build has MPI; without it, make_mpi_transport throws UsageError.
bool mpi_is_built();

// An MPI communicator of these ranks of the world. Collective over them. The first call starts MPI, unless the program
// has; it is shut down at normal exit. Throws UsageError when this process is not the MPI rank that the world says.
std::shared_ptr<Transport> make_mpi_transport(const WorldState& world, const std::vector<int>& world_ranks, int rank);

}  // namespace shoal
