#include "shoal/optimizer_in_backward.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/optim/lbfgs.h>
#include <torch/utils.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "engine/gradients/gradient_norm.h"
#include "engine/reducer/gradient_consumer.h"
#include "optim/param_groups.h"
#include "optim/scaler_options.h"
#include "shoal/error.h"
#include "shoal/group.h"

namespace shoal {

void OptimizerInBackwardOptions::validate() const {
  if (clip_grad >= 0 && std::isfinite(clip_grad)) return;
  throw UsageError(fmt::format("OptimizerInBackward: clip_grad is {}: give a norm, or 0 for no clipping", clip_grad));
}

namespace {

std::string name_of(WholeGradient choice) {
  if (choice == WholeGradient::exact) return "exact";
  return choice == WholeGradient::stale ? "stale" : "per_bucket";
}

std::vector<std::string> describe(const OptimizerInBackwardOptions& options) {
  return {fmt::format("clip_grad {}", options.clip_grad),
          fmt::format("whole_gradient {}", name_of(options.whole_gradient)), describe(options.scaler)};
}

// Scope that hides gradients from an optimizer while it updates the parameters of one bucket.
class Hidden {
 public:
  Hidden(torch::optim::Optimizer& optimizer, const std::vector<at::Tensor>& shown) {
    std::set<const c10::TensorImpl*> stay;
    for (const auto& parameter : shown) stay.insert(parameter.unsafeGetTensorImpl());
    for (auto& group : optimizer.param_groups()) {
      for (auto& parameter : group.params()) {
        if (stay.count(parameter.unsafeGetTensorImpl()) > 0 || !parameter.grad().defined()) continue;
        gradients_.emplace_back(parameter, std::exchange(parameter.mutable_grad(), {}));
      }
    }
  }
  Hidden(const Hidden&) = delete;
  Hidden& operator=(const Hidden&) = delete;
  ~Hidden() {
    for (auto& [parameter, gradient] : gradients_) parameter.mutable_grad() = gradient;
  }

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients_;
};

std::vector<at::Tensor> gradients_of(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> list;
  for (const auto& parameter : parameters) {
    if (parameter.grad().defined()) list.push_back(parameter.grad());
  }
  return list;
}

}  // namespace

struct OptimizerInBackward::State : public GradientConsumer {
  State(torch::optim::Optimizer& of, const OptimizerInBackwardOptions& chosen)
      : optimizer(&of), known(of.param_groups()), options(chosen) {
    if (options.scaler) scaler.emplace(*options.scaler);
  }

  bool needs_all() const override {
    if (optimizer == nullptr) {
      throw UsageError(
          "DistributedDataParallel: its OptimizerInBackward has been destroyed; keep it alive as long as the training");
    }
    if (const auto change = known.change(optimizer->param_groups()); !change.empty()) {
      throw UsageError(fmt::format(
          "OptimizerInBackward: {} after construction; construct the wrapper and OptimizerInBackward again", change));
    }
    if (options.whole_gradient == WholeGradient::per_bucket) return false;
    if (options.whole_gradient == WholeGradient::stale) return options.clip_grad > 0 && !norm;
    return options.clip_grad > 0 || scaler;
  }

  void see_all(const std::vector<at::Tensor>& gradients) override {
    if (!needs_all()) return;
    found = scaler && scaler->unscale(gradients);
    seen_all = true;
    if (found || options.clip_grad == 0) return;
    squares = std::pow(local_norm(gradients, 2), 2);
    clip_to_norm(gradients, std::sqrt(squares), options.clip_grad);
  }

  void take(const std::vector<at::Tensor>& parameters) override {
    const auto gradients = gradients_of(parameters);
    if (gradients.empty()) return;
    if (seen_all ? found : !prepare(gradients)) return;
    const Hidden others(*optimizer, parameters);
    optimizer->step();
  }

  void end_step(bool abandoned) override {
    if (!abandoned) {
      if (scaler) scaler->update(found);
      const bool known = options.clip_grad > 0 && options.whole_gradient != WholeGradient::per_bucket;
      if (known && !found && std::isfinite(squares)) norm = std::sqrt(squares);
    }
    found = seen_all = false;
    squares = 0;
  }

  std::optional<double> last_norm() const override { return norm; }
  void resume_from(std::optional<double> last) override { norm = last; }

  // Unscales and clips one bucket's gradients; false: they must not be used.
  bool prepare(const std::vector<at::Tensor>& gradients) {
    if (scaler && scaler->unscale(gradients)) {
      found = true;
      return false;
    }
    if (options.clip_grad > 0) {
      const auto own = local_norm(gradients, 2);
      squares += own * own;
      clip_to_norm(gradients, options.whole_gradient == WholeGradient::stale ? *norm : own, options.clip_grad);
    }
    return true;
  }

  torch::optim::Optimizer* optimizer;
  KnownParameters known;
  OptimizerInBackwardOptions options;
  std::optional<GradScaler> scaler{};
  std::optional<double> norm{};  // norm of the last whole step's gradients that was finite

  // State of the step in progress.
  bool seen_all = false;
  bool found = false;  // inf or NaN
  double squares = 0;  // sum over the gradients so far
};

OptimizerInBackward::OptimizerInBackward(DistributedDataParallelCore& core, torch::optim::Optimizer& optimizer,
                                         const OptimizerInBackwardOptions& options) {
  options.validate();
  if (dynamic_cast<const torch::optim::LBFGS*>(&optimizer) != nullptr) {
    throw UsageError(
        "OptimizerInBackward: L-BFGS evaluates a closure several times in a step; call its step() after backward");
  }
  core.check_optimizer(optimizer, "OptimizerInBackward");
  agree(core.group(), "the optimizer in backward", describe(options));
  state_ = std::make_shared<State>(optimizer, options);
  core.use_up_gradients(state_);
}

OptimizerInBackward::~OptimizerInBackward() {
  state_->optimizer = nullptr;
}

at::Tensor OptimizerInBackward::scale_loss(const at::Tensor& loss) const {
  return state_->scaler ? state_->scaler->scale(loss) : loss;
}

const GradScaler* OptimizerInBackward::scaler() const {
  return state_->scaler ? &*state_->scaler : nullptr;
}

GradScaler* OptimizerInBackward::scaler() {
  return state_->scaler ? &*state_->scaler : nullptr;
}

double OptimizerInBackward::last_norm() const {
  return state_->norm.value_or(0);
}

}  // namespace shoal
