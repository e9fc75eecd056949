#pragma once
// MPI in this process: initialisation, finalisation, errors and communicators. Only for files of comm/.

#include <mpi.h>

#include <chrono>
#include <memory>
#include <vector>

#include "base/environment.h"

namespace shoal {

struct WorldState;

// Throws std::runtime_error with MPI's error text unless `code` is MPI_SUCCESS.
void check_mpi(int code, const char* function);

// Initialises MPI unless the program has done so; what it initialised is finalised at normal exit. UsageError if mpirun
// has not started this process, or started it as another rank than the world says.
void start_mpi(const WorldState& world, const Environment& environment);

// Communicator of some world ranks, numbered in the given order. Collective over them.
class MpiCommunicator {
 public:
  MpiCommunicator(const WorldState& world, const std::vector<int>& world_ranks, std::chrono::milliseconds limit);
  ~MpiCommunicator();
  MpiCommunicator(const MpiCommunicator&) = delete;
  MpiCommunicator& operator=(const MpiCommunicator&) = delete;

  MPI_Comm get() const { return communicator_; }

 private:
  MPI_Comm communicator_ = MPI_COMM_NULL;
};

}  // namespace shoal
