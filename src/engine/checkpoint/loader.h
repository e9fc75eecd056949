#pragma once
// Loader of a checkpoint into a training.

#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/loading/slice_reader.h"
#include "engine/checkpoint/contents.h"
#include "engine/checkpoint/options.h"

namespace shoal {

// One load on one rank. Call check(), read_optimizers(), read_model() and finish() in this order, then differences().
// None of them is collective.
class TrainingLoader {
 public:
  // peer: this rank's number among those that have the same pieces with values of their own, if there are such. exact:
  // the checkpoint was written by the same strategy with the same number of ranks.
  TrainingLoader(const SliceReader& reader, CheckpointView view, std::optional<int> peer, const Group& group,
                 bool exact, const LoadOptions& options);

  // Leaves this rank's values of these tensors as they are; call it before the others.
  void keep(std::set<std::string> names) { kept_ = std::move(names); }
  // Parameters that have optimizer state in the checkpoint, and are none of those that are trained here.
  std::set<std::string> trained_there_alone() const;
  // UsageError if the checkpoint does not fit.
  void check() const;
  // Reads optimizer state into new memory; UsageError for the state of another kind of optimizer.
  void read_optimizers();
  // Reads parameters and buffers in place.
  void read_model() const;
  // Hands state to the optimizers and companions, and restores random number generators.
  void finish(const Companions& companions);
  // What differs from the checkpoint, one sentence each.
  std::vector<std::string> differences() const;

 private:
  using FreshState = std::unique_ptr<torch::optim::OptimizerParamState>;

  bool model_only() const { return options_.partial || options_.model_only; }
  // Whether this rank loads values that the checkpoint has of this rank alone. differ: ranks of this training may have
  // values of their own.
  bool is_own(const std::string& name, bool differ) const;
  // The name of this rank's own tensor in that case; else the common name.
  std::string own_name(const std::string& name, bool differ) const;
  void read(const std::string& name, const Range& range, const at::Tensor& destination,
            const std::vector<int64_t>& order) const;
  void read_whole(const std::string& name, const at::Tensor& destination) const;
  // Optimizer state of a parameter as the checkpoint has it.
  struct StoredState {
    std::optional<int> rank{};  // whose own it is; none: the common one
    std::vector<std::string> fields{};
  };
  void take_stored_names();
  void find_states(std::optional<int> peer);
  void note_common();
  std::set<std::string> trained_there() const;
  // The same the other way round; among them are none that are frozen, and never were updated.
  std::vector<std::string> trained_here_alone(const std::set<std::string>& there) const;
  void check_trained() const;
  at::Tensor read_field(const StatePiece& piece, const StoredState& stored, const std::string& field) const;
  NamedState read_state(const StatePiece& piece) const;
  // make_state() of the optimizer, whose errors name the checkpoint and the parameter.
  FreshState made_state(const torch::optim::Optimizer& of, const StatePiece& piece, const NamedState& state) const;
  std::map<std::string, double> numbers_of(const std::string& parameter) const;
  // Entry of rank 0's state, or of this rank's own state if ranks diverge.
  const nlohmann::json* shared_entry(const char* name) const;
  void restore(GradScaler* scaler);
  void read_options();
  void restore_rates();
  void restore(const std::vector<Schedule>& companions);
  void restore_random_numbers() const;

  const SliceReader& reader_;
  CheckpointView view_;
  bool diverges_;
  int rank_;
  int ranks_;
  bool exact_;
  LoadOptions options_;
  std::map<std::string, StoredState> states_;  // by parameter
  std::set<std::string> own_;                  // parameters of which this rank loads values and state of its own
  std::set<std::string> kept_;
  std::vector<std::pair<std::pair<torch::optim::Optimizer*, void*>, FreshState>> fresh_;
  std::optional<OptionsLoader> param_groups_;
  std::vector<std::string> differences_;
};

}  // namespace shoal
