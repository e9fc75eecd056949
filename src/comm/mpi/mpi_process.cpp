#include "comm/mpi/mpi_process.h"

#include <fmt/format.h>

#include <cstdlib>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "comm/mpi/mpi_work.h"
#include "comm/rendezvous/while_waiting.h"
#include "comm/rendezvous/world_state.h"
#include "comm/store/store.h"
#include "shoal/error.h"

namespace shoal {
namespace {

// Process-wide state that outlives main: never destroyed.
struct Process {
  std::mutex mutex;
  std::chrono::seconds patience{0};  // limit of the wait for the other ranks at exit
};

Process& process() {
  static auto* process = new Process;
  return *process;
}

bool is_finalized() {
  int finalized = 0;
  MPI_Finalized(&finalized);
  return finalized != 0;
}

// MPI_Finalize waits for all ranks forever, so it is called only once all are known to have come. A failed rank just
// ends; mpirun reports that and ends the others.
void finalize(int exit_code, void*) {
  if (exit_code != 0 || is_finalized()) return;
  MPI_Request request = MPI_REQUEST_NULL;
  if (MPI_Ibarrier(MPI_COMM_WORLD, &request) != MPI_SUCCESS) return;
  const auto deadline = std::chrono::steady_clock::now() + process().patience;
  for (int arrived = 0; arrived == 0 || any_in_flight();) {
    advance_all();
    if (MPI_Test(&request, &arrived, MPI_STATUS_IGNORE) != MPI_SUCCESS) return;
    if (std::chrono::steady_clock::now() > deadline) return;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  MPI_Finalize();
}

bool started_by_mpirun(const Environment& environment) {
  for (const auto* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMI_RANK", "PMIX_RANK"}) {
    if (environment(name)) return true;
  }
  return false;
}

void initialize() {
  int provided = 0;
  check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided), "MPI_Init_thread");
  check_mpi(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  on_exit(finalize, nullptr);
}

// Groups that are made at the same time need different tags only if they share ranks; groups of equal ranks are made in
// order.
int tag_of(const std::vector<int>& world_ranks) {
  uint32_t hash = 2166136261U;
  for (const int rank : world_ranks) hash = (hash ^ static_cast<uint32_t>(rank)) * 16777619U;
  constexpr uint32_t tags = 32768;  // guaranteed by the MPI standard
  return static_cast<int>(hash % tags);
}

MPI_Comm create(const std::vector<int>& world_ranks) {
  MPI_Group all = MPI_GROUP_NULL;
  MPI_Group some = MPI_GROUP_NULL;
  MPI_Comm communicator = MPI_COMM_NULL;
  check_mpi(MPI_Comm_group(MPI_COMM_WORLD, &all), "MPI_Comm_group");
  check_mpi(MPI_Group_incl(all, static_cast<int>(world_ranks.size()), world_ranks.data(), &some), "MPI_Group_incl");
  check_mpi(MPI_Comm_create_group(MPI_COMM_WORLD, some, tag_of(world_ranks), &communicator), "MPI_Comm_create_group");
  check_mpi(MPI_Comm_set_errhandler(communicator, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  MPI_Group_free(&some);
  MPI_Group_free(&all);
  return communicator;
}

}  // namespace

void check_mpi(int code, const char* function) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw std::runtime_error(fmt::format("{}: {}", function, std::string(text, static_cast<size_t>(length))));
}

void start_mpi(const WorldState& world, const Environment& environment) {
  const std::lock_guard lock(process().mutex);
  process().patience = std::chrono::seconds(world.options.timeout_seconds);
  const auto& placement = world.placement;
  int initialized = 0;
  check_mpi(MPI_Initialized(&initialized), "MPI_Initialized");
  if (initialized == 0) {
    if (!started_by_mpirun(environment)) {
      throw UsageError(
          fmt::format("transport mpi: this process was not started by mpirun (OMPI_COMM_WORLD_SIZE, PMI_SIZE and "
                      "PMIX_RANK are not set); start the ranks with mpirun -n {}",
                      placement.size));
    }
    initialize();
  }
  if (is_finalized()) throw UsageError("transport mpi: the program has already called MPI_Finalize");
  int threads = 0;
  int rank = 0;
  int size = 0;
  check_mpi(MPI_Query_thread(&threads), "MPI_Query_thread");
  check_mpi(MPI_Comm_rank(MPI_COMM_WORLD, &rank), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(MPI_COMM_WORLD, &size), "MPI_Comm_size");
  if (threads < MPI_THREAD_MULTIPLE) {
    throw UsageError("transport mpi: MPI was initialised without MPI_THREAD_MULTIPLE; request it in MPI_Init_thread");
  }
  if (rank != placement.rank || size != placement.size) {
    throw UsageError(
        fmt::format("transport mpi: this is rank {} of {} for MPI but rank {} of {} by {}: start the ranks "
                    "with mpirun -n {}, and let its variables number them",
                    rank, size, placement.rank, placement.size, placement.source, placement.size));
  }
}

MpiCommunicator::MpiCommunicator(const WorldState& world, const std::vector<int>& world_ranks,
                                 std::chrono::milliseconds limit) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  WhileWaiting while_waiting(world.options.while_waiting);
  const auto refuse = [ranks = world_ranks.size()](const std::string& why) {
    throw CommError(fmt::format("cannot connect {} ranks over MPI: {}", ranks, why));
  };
  const auto late = [&] {
    while_waiting.look();
    return std::chrono::steady_clock::now() > deadline;
  };
  const auto made = unless(late, [world_ranks, refuse] {
    MPI_Comm communicator = MPI_COMM_NULL;
    try {
      communicator = create(world_ranks);
    } catch (const std::runtime_error& error) {
      refuse(error.what());
    }
    return communicator;
  });
  if (!made) {
    refuse(fmt::format("not all of them made the group within {} s", std::chrono::duration<double>(limit).count()));
  }
  communicator_ = *made;
}

// Local in every known MPI, although the standard allows it to wait for the other ranks.
MpiCommunicator::~MpiCommunicator() {
  if (!is_finalized()) MPI_Comm_free(&communicator_);
}

}  // namespace shoal
