#pragma once
// Saving checkpoints, each rank its own slices (BEY05), at once or in the background (BEY06).

#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "checkpoint/format/named_slice.h"
#include "shoal/group.h"

namespace shoal {

// What a rank gives. Step and strategy must be equal on all ranks.
struct CheckpointContents {
  int64_t step = 0;
  std::string strategy;
  std::vector<NamedSlice> slices;  // of all ranks together: the whole of every tensor; equal slices are written once
  nlohmann::json rank_state = nlohmann::json::object();    // objects; what is this rank's alone: random state, position
  nlohmann::json global_state = nlohmann::json::object();  // rank 0's counts: scaler, schedule, configuration
};

struct CheckpointSaverOptions {
  int64_t keep_last = 0;       // older checkpoints than the last so many go after a save; 0: all stay
  int64_t snapshot_mb = 4096;  // MiB of memory for copies that save_async may keep on each rank
  // Throws UsageError that lists all faults.
  void validate() const;
};

// Saves to ROOT/step-N, which all ranks must see as one folder. A checkpoint appears there, complete and on disk, in
// one step, then `latest` names it, then older ones go; whatever happens before leaves the older ones as they are, and
// what a dead job has left is removed by the next save. Both ways of saving are collective. Errors are thrown on every
// rank: CheckpointError for files (names rank, file and reason; training can go on), UsageError for slices that do not
// fit, DisagreeError, CommError.
//
// Memory: without copies: pieces of 1 MiB. One save at a time and from one thread; the background thread speaks to its
// peers on a group of its own.
class CheckpointSaver {
 public:
  // Collective.
  CheckpointSaver(const Group& group, std::filesystem::path root, const CheckpointSaverOptions& options = {});
  // Waits for a save in the background; an error of it is lost here, so call wait() before.
  ~CheckpointSaver();
  CheckpointSaver(const CheckpointSaver&) = delete;
  CheckpointSaver& operator=(const CheckpointSaver&) = delete;

  // Returns when the checkpoint is there; old ones may be on their way out.
  void save(const CheckpointContents& contents);
  // Returns when the values have been copied, and may change. What does not fit into snapshot_mb is written before it
  // returns. Waits for the one before and throws its error, without having saved the new one.
  void save_async(const CheckpointContents& contents);
  // Until nothing is in the background. Throws its error.
  void wait();
  // Whether a save is in the background. Not collective.
  bool busy() const;

  struct State;

 private:
  std::unique_ptr<State> state_;
};

}  // namespace shoal
