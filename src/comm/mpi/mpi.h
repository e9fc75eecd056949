#pragma once

#include <memory>
#include <vector>

#include "comm/transport/transport.h"

namespace shoal {

struct WorldState;

// Whether this build includes MPI; without it, make_mpi_transport throws UsageError.
bool mpi_is_built();

// MPI communicator of these world ranks. Collective over them. The first call initialises MPI unless the program has
// done so, and finalises it at normal exit. UsageError if MPI gives this process another rank than the world does.
std::shared_ptr<Transport> make_mpi_transport(const WorldState& world, const std::vector<int>& world_ranks, int rank);

}  // namespace shoal
