#pragma once
// Joining the other ranks of the job.

#include <memory>
#include <optional>
#include <string>

#include "shoal/group.h"

namespace shoal {

class Timeline;

struct WorldOptions {
  // Who this process is. Without `rank` and `size` (give both or neither) the environment says: torchrun's or
  // `shoal launch`'s RANK and WORLD_SIZE, else Open MPI's, else PMI's, else Slurm's, else the process is alone. One
  // source is used as a whole; a partial one is refused.
  std::optional<int> rank{};
  std::optional<int> size{};
  // Where rank 0 listens. Default: the environment's MASTER_ADDR and MASTER_PORT, else loopback and port 29500.
  // Nothing listens on any other interface than this address's.
  std::optional<std::string> address{};
  std::optional<int> port{};

  // What carries the bytes. "host": memory that the ranks share; all of them must run on one host as one user. "gloo":
  // TCP. "auto": for every group "host" where it is possible; over several hosts with equally many ranks (at least 2)
  // the same inside each host and Gloo between them, every rank carrying its own range ("host+gloo"); else "gloo".
  // "mpi": in builds with MPI; mpirun must have started the ranks.
  std::string transport = "auto";

  // Lets ranks compare what they call before every operation. The host transport always does; elsewhere it costs a small
  // all-gather each time. Without it, ranks over Gloo that call different things wait for each other and get a
  // DisagreeError within two seconds; over MPI equal sizes of different things give wrong numbers.
  bool check_agreement = false;

  // A folder in which this rank keeps its last collectives, in a file that survives whatever ends the process; `shoal
  // flight FOLDER` reads the files of all ranks and says who waits for whom. Default: the environment's
  // SHOAL_FLIGHT_RECORDER, else none. See docs/telemetry.md.
  std::optional<std::string> flight_recorder{};
  // Gets what this rank does and when; none: nothing is traced.
  std::shared_ptr<Timeline> timeline{};

  // Takes the place of this rank's process, which has died, in a job that is running. The world's group does not
  // communicate then (UsageError): wrap a model in DecentralizedDataParallel, whose remaining() does. Needs the job's
  // store: a launcher's, or that of a rank 0 that is still there.
  bool rejoin = false;

  int rendezvous_timeout_seconds = 60;  // for all ranks to appear
  int timeout_seconds = 300;            // for one operation, with all peers alive
  int stopped_timeout_seconds = 5;      // for a peer on this host that is stopped by a signal

  // Throws UsageError that lists all faults.
  void validate() const;
};

struct WorldState;

// The job as this process sees it. A cheap handle; groups keep what they need of it alive.
class World {
 public:
  World(std::shared_ptr<WorldState> state, Group group);

  int rank() const;
  int size() const;
  int local_rank() const;  // among the ranks of this host, in rank order
  int local_size() const;
  const std::string& source() const;  // where rank and size came from: "options", "RANK and WORLD_SIZE", "alone", ...
  const Group& group() const;         // all ranks

 private:
  std::shared_ptr<WorldState> state_;
  Group group_;
};

// Collective over all ranks of the job (with `rejoin` not); once per process and job. Throws UsageError for a wrong or
// partial description of the job, and for a rank whose process is still there or never was; DisagreeError when ranks
// disagree on the world's size, CommError when ranks do not appear in time. Two jobs that were given one port are told
// apart by what their launchers call them (torchrun, Open MPI, Slurm, shoal launch) or by SHOAL_JOB_ID: UsageError for
// the one whose store it is not. Without either, both are nameless and taken for one.
World init(const WorldOptions& options = {});

}  // namespace shoal
