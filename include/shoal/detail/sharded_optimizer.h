#pragma once
// What optimizers have in common that update, on each rank, only the pieces which it owns.

#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "shoal/detail/optimizer_state.h"
#include "shoal/group.h"
#include "shoal/precision.h"

namespace shoal {

// What a step did.
struct ShardedStep {
  bool updated = true;                // false: some rank found inf or NaN, and nothing has changed
  std::optional<double> grad_norm{};  // with clip_grad, before clipping
  std::optional<int64_t> num_zeros{};
};

// Made by the strategies. Its param groups are the whole model's and keep their own options as the local optimizer
// would have them; schedulers work on it, and options may change between steps. The parameters stay those of the
// construction: after a change through torch::optim::Optimizer& the next step() is a UsageError that names it.
class ShardedOptimizerCore : public torch::optim::Optimizer {
 public:
  using ParamGroups = std::vector<torch::optim::OptimizerParamGroup>;
  using Factory = std::function<std::unique_ptr<torch::optim::Optimizer>(const ParamGroups& groups)>;
  struct State;
  ~ShardedOptimizerCore() override;

  // Scales a loss as the scaler says; without scaler the loss itself.
  at::Tensor scale_loss(const at::Tensor& loss) const;
  // Unscales, looks for inf and NaN, clips, updates this rank's pieces in float32 and hands them out. Collective.
  //
  // What lies in grad() decides, as with any libtorch optimizer: of a parameter whose grad() is undefined nothing is
  // updated, a zeroed one counts as zero, a tensor that was set by hand is the gradient (all ranks must set the same).
  // After a reduction grad() holds a tensor without memory that stands for the sum: zero_grad() in every form drops or
  // zeroes it; an operator that reads it throws a UsageError that names the parameter and the call to use. UsageError,
  // too, where gradients have been accumulated under no_sync and not been averaged since; with a scaler for a second
  // step, or a further backward, with the same gradients.
  ShardedStep step();
  at::Tensor step(LossClosure closure) override;

  // The whole optimizer's state by name, with the float32 main parameters of 16-bit ones: on rank `recipient` of the
  // group, elsewhere empty; none: on every rank. Moves one parameter at a time. Collective.
  OptimizerState state_dict(std::optional<int> recipient = std::nullopt) const;
  // Every rank gives the whole state, whatever strategy and number of ranks it comes from. See load_optimizer_state.
  void load_state_dict(const OptimizerState& state);
  // For torch::save and torch::load. UsageError: a rank has no more than its own pieces; take shoal::save and
  // shoal::load (shoal/checkpoint.h), or state_dict() and load_state_dict().
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
  // UsageError that says for each parameter why it cannot come: ranges of all of them are laid out at the construction.
  [[noreturn]] void add_param_group(const torch::optim::OptimizerParamGroup& group);
  [[noreturn]] void add_parameters(const std::vector<at::Tensor>& parameters);
  const GradScaler* scaler() const;
  // The ranks that share the optimizer's state among them.
  const Group& group() const;
  // This rank's optimizer over its pieces, with its state.
  const torch::optim::Optimizer& local_optimizer() const;

 protected:
  // groups: of the parameters of state's modules. make: the optimizer that a rank runs on its pieces. Collective.
  ShardedOptimizerCore(ParamGroups groups, std::unique_ptr<torch::optim::OptimizerOptions> defaults,
                       const Factory& make, std::unique_ptr<State> state);
  // Within a step: before gradients are looked at, and before updated pieces leave.
  virtual void complete_gradients() {}
  virtual void end_gradients() {}
  // Whether pieces change, and leave, also in a step without an update.
  virtual bool moves_without_update() const { return false; }
  // Before gradients are used: see step(). Throws without having changed anything.
  void prepare_gradients();
  // All ranks get this rank's pieces.
  void publish();
  // Parameters that others have replaced or written since the last step; step() does it first. Collective.
  void adopt_changes() const;
  State& state() const { return *state_; }

 private:
  void collect_gradients();
  double clip_grad_norm(double max_norm, double norm_type);
  ParamGroups shares_of(const ParamGroups& groups) const;
  bool anywhere(bool here, const char* what) const;
  ShardedStep update_if_finite();
  void update(bool finite);

  std::unique_ptr<State> state_;
};

}  // namespace shoal
