// Substitute for mpi.cpp if CMake finds no MPI.

#include "comm/mpi/mpi.h"
#include "shoal/error.h"

namespace shoal {

bool mpi_is_built() {
  return false;
}

std::string why_no_mpi() {
  return "not in this build: install an MPI (Debian: libopenmpi-dev) and build again";
}

std::shared_ptr<Transport> make_mpi_transport(const WorldState&, const std::vector<int>&, int, Milliseconds) {
  throw UsageError("transport mpi is " + why_no_mpi());
}

}  // namespace shoal
