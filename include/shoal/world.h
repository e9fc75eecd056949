#pragma once
// Process start-up: init() connects the ranks of a job and returns its World.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "shoal/group.h"

namespace c10d {
class Store;
}

namespace shoal {

class Timeline;

struct WorldOptions {
  // Rank and size of the job. Set both or neither. If neither is set, they come from the first of these environments
  // that is present: RANK and WORLD_SIZE (torchrun, `shoal launch`), Open MPI, PMI, Slurm; otherwise the job has one
  // rank. A source that is incomplete is a UsageError; sources are never mixed.
  std::optional<int> rank{};
  std::optional<int> size{};
  // Address and port on which rank 0 listens. Default: MASTER_ADDR and MASTER_PORT, otherwise 127.0.0.1 and port 29500.
  // Ranks listen only on the interface of this address.
  std::optional<std::string> address{};
  std::optional<int> port{};

  // Transport of collectives. "host": memory shared by the ranks; requires that all ranks run on one host as one user.
  // "tcp": sockets. "auto": per group, "host" where possible; for several hosts with the same number of ranks (at least
  // 2), "host+tcp", which uses shared memory within a host and tcp between hosts, with every rank sending its own
  // part; otherwise "tcp". "gloo": PyTorch's. "mpi": requires a build with MPI and a start by mpirun.
  // Collectives on GPU tensors. "auto": NCCL if this build has it and each rank can have a GPU of its own, else through
  // CPU memory. "nccl": NCCL, and "auto" for CPU tensors. Other values: through CPU memory. Messages always go through
  // CPU memory.
  std::string transport = "auto";

  // Compare the arguments of every collective over all ranks before it starts. host and tcp always do this;
  // other transports, NCCL among them, pay a small all-gather per operation. If it is off, mismatched calls over Gloo
  // end in a DisagreeError within two seconds, and mismatched calls of equal size over MPI and NCCL give wrong numbers.
  bool check_agreement = false;

  // Folder for the flight recorder: a file per rank with its last collectives, which survives a crash of the process.
  // `shoal flight FOLDER` reads the files of all ranks and reports which rank waits for which. Default: the environment
  // variable SHOAL_FLIGHT_RECORDER; if it is unset, nothing is recorded. See docs/telemetry.md.
  std::optional<std::string> flight_recorder{};
  // Records what this rank does and when; nullptr disables tracing.
  std::shared_ptr<Timeline> timeline{};

  // Replace a rank whose process has died in a job that is still running. The world's group cannot communicate in the
  // new process (UsageError); wrap the model in DecentralizedDataParallel and use its remaining(). Requires the job's
  // store to be alive, which the launcher or rank 0 provides.
  bool rejoin = false;

  int rendezvous_timeout_seconds = 60;  // for all ranks to connect
  int timeout_seconds = 300;            // for one operation while all peers are alive
  int stopped_timeout_seconds = 5;      // for a peer on this host that was stopped by a signal

  // Called about every 100 ms by each thread that waits for other ranks, but not while it waits for the job's store to
  // answer. An exception that it throws ends that wait and reaches the caller; the operation goes on, and may be waited
  // for again. In a backward that has given its gradients, the others use the sums: the next step is a UsageError on
  // all ranks.
  std::function<void()> while_waiting{};

  // Throws UsageError with a list of all invalid options.
  void validate() const;
};

struct WorldState;
struct WorldCell;

// Handle on the job, cheap to copy. Groups keep alive what they need of it. In an elastic job (shoal/elastic.h) all
// copies follow when ranks are lost or come: rank(), size() and group() are then those of the ranks that there are.
class World {
 public:
  World(std::shared_ptr<WorldState> state, Group group);

  int rank() const;
  int size() const;
  int local_rank() const;  // rank among the ranks of this host
  int local_size() const;
  // Whether this process has come to an elastic job that was running already (shoal launch --elastic MIN:MAX). Until
  // the constructor of shoal::Elastic has returned, it is alone: rank() and local_rank() are 0, size() and local_size()
  // 1, in the world's group, too. So it constructs model, wrapper and optimizer as any rank does.
  bool joining() const;
  const std::string& source() const;  // origin of rank and size: "options", "RANK and WORLD_SIZE", "alone", ...
  const Group& group() const;         // the group of all ranks

  // Returns once all ranks have called it. Collective.
  void barrier() const;
  // As Group::all_reduce, over all ranks. Collective.
  //   const double seen = world.all_reduce(samples);
  //   const double loss = world.all_reduce(rank_loss, shoal::ReduceOp::avg);
  double all_reduce(double value, ReduceOp op = ReduceOp::sum) const;
  std::vector<double> all_reduce(std::vector<double> values, ReduceOp op = ReduceOp::sum) const;

  // Prints a line to standard output on rank 0, and nothing on other ranks: the parts, separated by spaces, as Python's
  // print does. Not collective.
  //   world.print0("epoch", epoch, "loss", loss);
  template <class... Parts>
  void print0(const Parts&... parts) const {
    if (rank() != 0) return;
    std::ostringstream line;
    const char* between = "";
    ((line << std::exchange(between, " ") << parts), ...);
    print_line(line.str());
  }

  // Seeds libtorch's generators on all devices with `seed` + rank: every rank has random numbers of its own, the same
  // in every run. For dropout, augmentation and noise. torch::manual_seed(seed) gives all ranks the same numbers. In a
  // process that has come to an elastic job its number among all processes of the job counts, which no other one gets.
  // Not collective.
  void manual_seed(uint64_t seed) const;

 private:
  friend const std::shared_ptr<WorldCell>& cell_of(const World& world);
  static void print_line(const std::string& line);

  std::shared_ptr<WorldCell> cell_;
};

// Connects this process to the other ranks of the job. Call it once per process. Collective over all ranks, except with
// `rejoin`. Throws UsageError for an invalid or incomplete description of the job, and with `rejoin` for a rank whose
// process is alive or never existed; DisagreeError if the ranks disagree on the world size, the transport or
// check_agreement; CommError if ranks do not connect in time. Two jobs that use the same port are distinguished by the
// job id of their launcher (torchrun, Open MPI, Slurm, shoal launch) or by SHOAL_JOB_ID: the job that does not own the
// store gets a UsageError. Jobs without any id cannot be distinguished.
World init(const WorldOptions& options = {});
// As init(options), for a program that is connected to a store of c10d: torch.distributed's, for example. The ranks
// meet in that store alone: no address, no port, no server. Requires options.rank and options.size. A process may call
// it again, also with the same store, once it has released the previous World and its groups.
World init(const c10::intrusive_ptr<c10d::Store>& store, const WorldOptions& options);

}  // namespace shoal
