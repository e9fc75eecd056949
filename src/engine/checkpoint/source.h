#pragma once
// Interface between strategies and checkpoints.

#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/format/named_slice.h"
#include "engine/sharded/sharded_state.h"
#include "module/walk.h"
#include "shoal/checkpoint.h"

namespace shoal {

// Tensors that this rank saves, and loads into.
struct CheckpointView {
  // Pieces of parameters that one optimizer updates.
  struct Share {
    std::vector<StatePiece> pieces;    // of all ranks
    int rank = 0;                      // this rank's index among the pieces' owners
    torch::optim::Optimizer* local{};  // this rank's optimizer; nullptr: no state yet
    bool everywhere = false;           // every rank owns all pieces
  };
  std::vector<Share> shares;
  std::vector<NamedSlice> rest;    // of frozen parameters
  bool frozen_may_differ = false;  // between ranks; a save compares them
  // Parameters and buffers of which each rank has values of its own, as those that a wrapper ignores; other numbers of
  // ranks load rank 0's. Of a share only where it is `everywhere`.
  std::set<std::string> own{};
  std::vector<std::string> transient{};  // buffers that are no part of the state; a checkpoint may have them
  std::map<std::string, std::vector<std::string>> aliases{};  // further names of tied tensors, by the first one
  std::map<const c10::TensorImpl*, std::string> names{};      // of the module's parameters, also of frozen ones
  std::vector<std::pair<const torch::nn::Module*, std::string>> modules{};  // with the prefix of their names
  std::vector<NamedSlice> buffers;  // and buffer-like tensors, one set per rank; other numbers of ranks load rank 0's
  std::vector<torch::optim::Optimizer*> optimizers;   // optimizers whose param groups' options are saved
  std::vector<torch::optim::LRScheduler*> schedules;  // the strategy's own
  GradScaler* scaler = nullptr;
};

// State that a strategy carries from step to step beside the training's tensors.
struct Carried {
  nlohmann::json values{};  // null: nothing
  std::map<std::string, at::Tensor> tensors{};
};

struct CarriedStates {
  Carried own;     // this rank's; restored by the same strategy with the same number of ranks
  Carried common;  // the same on all ranks; restored by the same strategy
};

class CheckpointSource {
 public:
  virtual ~CheckpointSource() = default;
  virtual std::string strategy() const = 0;
  // Whether a checkpoint of this strategy has what this one carries beside parameters and optimizer state.
  virtual bool continues(const std::string& saved) const { return saved == strategy(); }
  // The ranks that save and load. Collective.
  virtual Group group() = 0;
  // Called before view() for a load: takes over what the program has changed since the last step, as the next step
  // would. Collective.
  virtual void adopt_changes() {}
  // The same for a save, which takes over no values, but shows those in place: the program may take them away again.
  virtual void begin_save() {}
  virtual CheckpointView view() = 0;
  // Before a load of parameters that are not in view() and have optimizer state in the checkpoint. Those that are
  // frozen now and can be trained later without a new wrapper belong to view() from now on, so that they get their
  // state. Collective.
  virtual void own_frozen(const std::set<std::string>& /*names*/) {}
  // Ranks that have the same pieces with values of their own; other strategies load their mean. Frozen parameters may
  // differ, too. None: equal pieces have equal values.
  virtual std::optional<Group> peers() { return std::nullopt; }

  // Throws UsageError within a scope that shows other values than the training's and ends with those: a load would be
  // lost, and a save would store what is shown. Not collective.
  virtual void require_own_values() const {}

  virtual CarriedStates carried() { return {}; }
  // Called before view() is loaded to. Collective; throws on every rank.
  virtual void begin_load(const CarriedStates& past);
  // Called once all values are in place. Collective.
  virtual void end_load(const CarriedStates& /*past*/) {}
  // Parts of the carried state that the last load could not restore, one sentence each.
  virtual std::vector<std::string> differences() const { return differences_; }

 protected:
  std::vector<std::string> differences_{};
};

// UsageError for an optimizer of which some parameters are none of the module's, by whose names they are saved.
void require_parameters_of(const torch::nn::Module& module, const torch::optim::Optimizer& optimizer);

// Adds to `own` what a wrapper ignores: `wrapped` are the others of the module's tensors.
void add_ignored(CheckpointView& view, const torch::nn::Module& module, const ModuleTensors& wrapped,
                 const std::string& prefix = "");

// Adds a module's buffers, the parameters that are in no share, and aliases; `prefix` begins their names.
void add_rest(CheckpointView& view, const torch::nn::Module& module, const std::string& prefix = "");

}  // namespace shoal
