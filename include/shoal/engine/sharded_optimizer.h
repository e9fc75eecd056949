#pragma once
// What optimizers have in common that update, on each rank, only the pieces which it owns.

#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "shoal/comm/group.h"
#include "shoal/optim/grad_scaler.h"
#include "shoal/optim/optimizer_state.h"

namespace shoal {

// What a step did.
struct ShardedStep {
  bool updated = true;                // false: some rank found inf or NaN, and nothing has changed
  std::optional<double> grad_norm{};  // with clip_grad, before clipping
  std::optional<int64_t> num_zeros{};
};

// Made by the strategies. Its param groups are the whole model's; schedulers work on it, and options may change between
// steps.
class ShardedOptimizerCore : public torch::optim::Optimizer {
 public:
  using ParamGroups = std::vector<torch::optim::OptimizerParamGroup>;
  using Factory = std::function<std::unique_ptr<torch::optim::Optimizer>(const ParamGroups& groups)>;
  struct State;
  ~ShardedOptimizerCore() override;

  // Scales a loss as the scaler says; without scaler the loss itself.
  at::Tensor scale_loss(const at::Tensor& loss) const;
  // Unscales, looks for inf and NaN, clips, updates this rank's pieces in float32 and hands them out. Collective.
  ShardedStep step();
  at::Tensor step(LossClosure closure) override;
  // Drops the sums of gradients. set_to_none only matters for grad(), which is undefined after a reduction.
  void zero_grad(bool set_to_none = true);

  // The whole optimizer's state by name, with the float32 main parameters of 16-bit ones: on rank `recipient` of the
  // group, elsewhere empty; none: on every rank. Moves one parameter at a time. Collective.
  OptimizerState state_dict(std::optional<int> recipient = std::nullopt) const;
  // Every rank gives the whole state, whatever strategy and number of ranks it comes from. See load_optimizer_state.
  void load_state_dict(const OptimizerState& state);
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
  // All ranks get this rank's pieces.
  void publish();
  State& state() const { return *state_; }

 private:
  std::vector<at::Tensor> collect_gradients();
  bool anywhere(bool here, const char* what) const;
  ShardedStep update_if_finite();
  void update(bool finite);

  std::unique_ptr<State> state_;
};

}  // namespace shoal
