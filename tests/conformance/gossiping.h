#pragma once
// DecentralizedDataParallel as a strategy for behaviours; it has no optimizer to step, because backward updates.

#include <utility>

#include "shoal/checkpoint.h"
#include "shoal/decentralized.h"
#include "tests/conformance/trained.h"

namespace shoal::test {

template <class Module>
class Decentralized : public Callable<Decentralized<Module>, Module> {
 public:
  Decentralized(std::shared_ptr<Module> model, const Setup& setup, const Group& group)
      : model_(prepared(std::move(model), setup)),
        parallel_(model_, optimizer_of(setup), group, options(setup, group)) {
    if (setup.groups) throw Lacks("param groups: a function makes the optimizer of each bucket");
    scale_ = loss_scale();
  }
  template <class... Arguments>
  auto call(Arguments&&... arguments) {
    return parallel_.forward(std::forward<Arguments>(arguments)...);
  }
  void backward(const at::Tensor& loss_sum, double weight) override { parallel_.backward(loss_sum, weight); }
  Trained::Scope no_sync(bool accumulate) override { return scope(parallel_.no_sync(accumulate)); }
  // Backward has updated the parameters, unless the loss scale has fallen.
  bool step() override {
    const double before = std::exchange(scale_, loss_scale());
    return scale_ >= before;
  }
  void zero_grad() override { model_->zero_grad(); }
  torch::optim::Optimizer& optimizer() override { throw Lacks("an optimizer to step: backward updates"); }
  double clip(double) override { throw Lacks("a clip between backward and step: clip_grad of the options"); }
  at::Tensor scale(const at::Tensor& loss) override { return parallel_.scale_loss(loss); }
  double loss_scale() override { return parallel_.scaler() != nullptr ? parallel_.scaler()->value() : 1; }
  Joinable& joinable() override { throw Lacks("Join: a rank that has run out calls leave() or step_without_update()"); }
  void abandon_step() override { parallel_.abandon_step(); }
  std::unique_ptr<TrainingState> state() override { return std::make_unique<TrainingState>(parallel_); }
  OptimizerState optimizer_state() override { return parallel_.state_dict(); }
  void load_optimizer_state(const OptimizerState& state) override { parallel_.load_state_dict(state); }

 private:
  static std::shared_ptr<Module> prepared(std::shared_ptr<Module> model, const Setup& setup) {
    if (setup.scaler) model->to(at::kFloat);
    return model;
  }
  static OptimizerRecipe optimizer_of(const Setup& setup) {
    return with_optimizer(
        setup, [](const auto& defaults, auto of) { return optimizer_recipe<typename decltype(of)::type>(defaults); });
  }
  static DecentralizedDataParallelOptions options(const Setup& setup, const Group& group) {
    DecentralizedDataParallelOptions options{.topology = make_topology("complete", group.size()),
                                             .clip_grad = setup.clip,
                                             .scaler = setup.scaler,
                                             .ignored = setup.ignored,
                                             .neighbour_timeout_seconds = 30,
                                             .bucket_cap_mb = 1e-4};
    if (setup.scaler) options.precision.compute = at::kHalf;
    return options;
  }

  std::shared_ptr<Module> model_;
  DecentralizedDataParallel<Module> parallel_;
  double scale_ = 0;
};

}  // namespace shoal::test
