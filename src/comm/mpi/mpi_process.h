#pragma once
// MPI in this process: its start and end, its errors, communicators. Only for files of comm/.

#include <mpi.h>

#include <memory>
#include <vector>

#include "base/environment.h"

namespace shoal {

struct WorldState;

// Throws std::runtime_error with MPI's own words unless `code` is MPI_SUCCESS.
void check_mpi(int code, const char* function);

// Initialises MPI unless the program has, and then finalises it at normal exit. Throws UsageError when mpirun has not
// started this process, or as another rank than the world says.
void start_mpi(const WorldState& world, const Environment& environment);

// A communicator of some ranks of the world, numbered in the order given. Collective over them.
class MpiCommunicator {
 public:
  MpiCommunicator(const WorldState& world, const std::vector<int>& world_ranks);
  ~MpiCommunicator();
  MpiCommunicator(const MpiCommunicator&) = delete;
  MpiCommunicator& operator=(const MpiCommunicator&) = delete;

  MPI_Comm get() const { return communicator_; }

 private:
  MPI_Comm communicator_ = MPI_COMM_NULL;
};

}  // namespace shoal
