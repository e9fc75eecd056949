// Substitute for mpi.cpp if CMake finds no MPI.

#include "comm/mpi/mpi.h"
#include "shoal/error.h"

namespace shoal {

bool mpi_is_built() {
  return false;
}

std::shared_ptr<Transport> make_mpi_transport(const WorldState&, const std::vector<int>&, int) {
  throw UsageError("transport mpi is not in this build: install an MPI (libopenmpi-dev) and build again");
}

}  // namespace shoal
