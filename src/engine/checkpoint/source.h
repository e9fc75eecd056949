#pragma once
// What a strategy gives to checkpoints and takes from them.

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "checkpoint/named_slice.h"
#include "engine/sharded_state.h"
#include "shoal/engine/checkpoint.h"

namespace shoal {

// What this rank has, and where to load it to.
struct CheckpointView {
  // The pieces of parameters that an optimizer updates.
  struct Share {
    std::vector<StatePiece> pieces;    // of all ranks
    int rank = 0;                      // this one's number among their owners
    torch::optim::Optimizer* local{};  // this rank's; none: there is no state yet
    bool everywhere = false;           // every rank owns all pieces
  };
  std::vector<Share> shares;
  std::vector<NamedSlice> rest;     // of frozen parameters
  std::vector<NamedSlice> buffers;  // and the like: each rank's own; rank 0's count for other numbers of ranks
  std::vector<torch::optim::Optimizer*> rates;  // whose param groups have the same rates on all ranks
  std::vector<LambdaLR*> schedules;             // of the strategy's own
  GradScaler* scaler = nullptr;
};

class CheckpointSource {
 public:
  virtual ~CheckpointSource() = default;
  virtual std::string strategy() const = 0;
  // The ranks that save and load. Collective.
  virtual Group group() = 0;
  virtual CheckpointView view() = 0;
  // Whether every rank trains parameters of its own: the mean counts for other strategies.
  virtual bool diverges() const { return false; }

  // What else belongs to this rank, and to all of them alike.
  virtual nlohmann::json own_state() { return nullptr; }
  // Before view() is loaded to. own: own_state() of the same rank where the same strategy wrote it at the same number
  // of ranks, else null. Collective.
  virtual void begin_load(const nlohmann::json& own);
  // Values are in place. Collective.
  virtual void end_load(const nlohmann::json& /*own*/) {}
};

// Adds the buffers of a module, and the parameters that are in no share; names begin with `prefix`.
void add_rest(CheckpointView& view, const torch::nn::Module& module, const std::string& prefix = "");

}  // namespace shoal
