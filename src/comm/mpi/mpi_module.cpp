// Entry of the library that loaded_mpi.cpp loads.

#include "comm/mpi/mpi.h"

void shoal_connect_over_mpi(const shoal::WorldState& world, const std::vector<int>& world_ranks, int rank,
                            shoal::Milliseconds limit, std::shared_ptr<shoal::Transport>& made) {
  made = shoal::connect_over_mpi(world, world_ranks, rank, limit);
}
