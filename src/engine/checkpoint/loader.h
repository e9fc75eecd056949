#pragma once
// A checkpoint's values into a training.

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/loading/reader.h"
#include "engine/checkpoint/contents.h"
#include "engine/checkpoint/options.h"

namespace shoal {

// One load, as one rank sees it: check(), read_optimizers(), read_model(), finish(), in this order, then differences().
// None is collective.
class TrainingLoader {
 public:
  // exact: the same strategy wrote it at the same number of ranks.
  TrainingLoader(const CheckpointReader& reader, CheckpointView view, bool diverges, const Group& group, bool exact,
                 const LoadOptions& options);

  // UsageError unless the checkpoint fits.
  void check() const;
  // Into memory of its own; UsageError for another optimizer's.
  void read_optimizers();
  // In place.
  void read_model() const;
  // Optimizers get their state, the companions theirs, and random numbers.
  void finish(const Companions& companions);
  // What is not as it was saved, one sentence each.
  std::vector<std::string> differences() const;

 private:
  using FreshState = std::unique_ptr<torch::optim::OptimizerParamState>;

  bool model_only() const { return options_.partial || options_.model_only; }
  // The name under which this rank's own values lie, where it has some; else the common one.
  std::string own_name(const std::string& name) const;
  void read(const std::string& name, const Range& range, const at::Tensor& destination,
            const std::vector<int64_t>& order) const;
  void read_whole(const std::string& name, const at::Tensor& destination) const;
  at::Tensor read_field(const StatePiece& piece, const std::string& common) const;
  NamedState read_state(const StatePiece& piece) const;
  std::map<std::string, double> numbers_of(const std::string& parameter) const;
  // An entry of the state that is rank 0's, or where ranks diverge each one's own.
  const nlohmann::json* shared_entry(const char* name) const;
  void restore(GradScaler* scaler);
  void read_options();
  void restore_rates();
  void restore(const std::vector<Schedule>& companions);
  void restore_random_numbers() const;

  const CheckpointReader& reader_;
  CheckpointView view_;
  bool diverges_;
  int rank_;
  int ranks_;
  bool exact_;
  LoadOptions options_;
  std::map<std::string, std::vector<std::string>> fields_;  // by parameter
  std::vector<std::pair<std::pair<torch::optim::Optimizer*, void*>, FreshState>> fresh_;
  std::optional<OptionsLoader> param_groups_;
  std::vector<std::string> differences_;
};

}  // namespace shoal
