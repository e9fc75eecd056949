#pragma once
// Transport over MPI.

#include <memory>
#include <string>
#include <vector>

#include "comm/transport/transport.h"

namespace shoal {

struct WorldState;

// Whether this build includes MPI; without it, make_mpi_transport throws UsageError.
bool mpi_is_built();
// Why it cannot be used on this machine; empty if it can. May load MPI.
std::string why_no_mpi();

// MPI communicator of these world ranks. Collective over them. The first call initialises MPI unless the program has
// done so, and finalises it at normal exit. UsageError if MPI gives this process another rank than the world does.
// limit: of the wait for the others.
std::shared_ptr<Transport> make_mpi_transport(const WorldState& world, const std::vector<int>& world_ranks, int rank,
                                              Milliseconds limit);

// The same in mpi.cpp alone, and as loaded_mpi.cpp finds it in a library.
std::shared_ptr<Transport> connect_over_mpi(const WorldState& world, const std::vector<int>& world_ranks, int rank,
                                            Milliseconds limit);

}  // namespace shoal

extern "C" void shoal_connect_over_mpi(const shoal::WorldState& world, const std::vector<int>& world_ranks, int rank,
                                       shoal::Milliseconds limit, std::shared_ptr<shoal::Transport>& made);
