#pragma once
// Interface between strategies and checkpoints.

#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/format/named_slice.h"
#include "engine/sharded/sharded_state.h"
#include "shoal/checkpoint.h"

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
  std::vector<torch::optim::Optimizer*> optimizers;  // whose param groups' options belong to it
  std::vector<LambdaLR*> schedules;             // of the strategy's own
  GradScaler* scaler = nullptr;
};

// What a strategy carries from step to step beside the tensors of the training.
struct Carried {
  nlohmann::json values{};  // null: nothing
  std::map<std::string, at::Tensor> tensors{};
};

struct CarriedStates {
  Carried own;     // this rank's: comes back where the same strategy wrote it at the same number of ranks
  Carried common;  // the same on all ranks: comes back where the same strategy wrote it
};

class CheckpointSource {
 public:
  virtual ~CheckpointSource() = default;
  virtual std::string strategy() const = 0;
  // The ranks that save and load. Collective.
  virtual Group group() = 0;
  virtual CheckpointView view() = 0;
  // The ranks that have the same pieces as this one, each with values of its own: their mean counts for other
  // strategies. None: what several ranks have is equal.
  virtual std::optional<Group> peers() { return std::nullopt; }

  virtual CarriedStates carried() { return {}; }
  // Before view() is loaded to. Collective, errors on every rank.
  virtual void begin_load(const CarriedStates& past);
  // Values are in place. Collective.
  virtual void end_load(const CarriedStates& /*past*/) {}
};

// Adds the buffers of a module, and the parameters that are in no share; names begin with `prefix`.
void add_rest(CheckpointView& view, const torch::nn::Module& module, const std::string& prefix = "");

}  // namespace shoal
