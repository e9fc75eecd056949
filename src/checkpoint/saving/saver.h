#pragma once
// Saver of checkpoints: each rank writes its own slices, synchronously or in the background.

#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "checkpoint/format/named_slice.h"
#include "shoal/group.h"

namespace shoal {

// A rank's contribution to a checkpoint. Step and strategy must be equal on all ranks.
struct CheckpointContents {
  int64_t step = 0;
  std::string strategy;
  std::vector<NamedSlice> slices;  // all ranks' slices together cover every tensor; equal slices are written once
  nlohmann::json rank_state = nlohmann::json::object();    // JSON objects; this rank's own: random state, position
  nlohmann::json global_state = nlohmann::json::object();  // rank 0's is saved: scaler, schedule, configuration
};

struct CheckpointSaverOptions {
  int64_t keep_last = 0;       // keeps the newest N checkpoints; 0 keeps all
  int64_t snapshot_mb = 4096;  // MiB for copies that save_async may keep on each rank
  // UsageError lists all faults.
  void validate() const;
};

// Saves to ROOT/step-N, which must be one folder that all ranks share. A checkpoint appears there atomically, complete
// and durable. Then `latest` points at it, and older checkpoints are removed. A failure before that leaves older
// checkpoints intact; the next save removes what a dead job has left. Both ways of saving are collective. Errors are
// thrown on every rank: CheckpointError for files (names rank, file and reason; training can go on), UsageError for
// slices that do not fit, DisagreeError, CommError.
//
// Memory without copies: pieces of 1 MiB. Use it from one thread, one save at a time; the background thread has a group
// of its own.
class CheckpointSaver {
 public:
  // Collective.
  CheckpointSaver(const Group& group, std::filesystem::path root, const CheckpointSaverOptions& options = {});
  // Waits for a save in the background. Its error is lost here, so call wait() before.
  ~CheckpointSaver();
  CheckpointSaver(const CheckpointSaver&) = delete;
  CheckpointSaver& operator=(const CheckpointSaver&) = delete;

  // Returns when the checkpoint is published; removal of old ones may still run.
  void save(const CheckpointContents& contents);
  // Returns when the values have been copied and may change. Values that do not fit into snapshot_mb are written before
  // it returns. Waits for the previous save and throws its error, without saving anything.
  void save_async(const CheckpointContents& contents);
  // Waits for the save in the background, and throws its error, unless a change of the ranks of an elastic job has cut
  // it off.
  void wait();
  // The checkpoint that was cut off so, once; empty: none.
  std::string take_lost();
  // Whether a save is in the background. Not collective.
  bool busy() const;

  struct State;

 private:
  std::unique_ptr<State> state_;
};

}  // namespace shoal
