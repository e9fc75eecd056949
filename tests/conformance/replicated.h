#pragma once
// Strategies in which every rank has all gradients, and one process.

#include "engine/gradients/gradient_norm.h"
#include "shoal/checkpoint.h"
#include "shoal/ddp.h"
#include "shoal/local_updates.h"
#include "shoal/zero.h"
#include "tests/conformance/trained.h"

namespace shoal::test {

// A libtorch optimizer with its companions, as in one process.
template <class Self, class Module>
class WithTorchOptimizer : public Callable<Self, Module> {
 public:
  WithTorchOptimizer(std::shared_ptr<Module> model, const Setup& setup) : model_(std::move(model)), setup_(setup) {
    if (setup.scaler) {
      model_->to(at::kFloat);
      scaler_.emplace(*setup.scaler);
      precision_.compute = at::kHalf;
    }
  }

  torch::optim::Optimizer& optimizer() override { return *optimizer_; }
  std::shared_ptr<torch::optim::Optimizer> shared_optimizer() override { return optimizer_; }
  void zero_grad() override { optimizer_->zero_grad(); }
  bool step() override {
    const bool found = scaler_ && scaler_->unscale(gradients_of(*model_));
    if (scaler_) scaler_->update(found);
    if (!found && setup_.clip > 0) clip(setup_.clip);
    update(!found);
    return !found;
  }
  double clip(double max_norm) override {
    return torch::nn::utils::clip_grad_norm_(distinct(model_->parameters()), max_norm);
  }
  at::Tensor scale(const at::Tensor& loss) override { return scaler_ ? scaler_->scale(loss) : loss; }
  double loss_scale() override { return scaler_ ? scaler_->value() : 1; }

 protected:
  void make_optimizer() {
    if (setup_.optimizer_of != nullptr) {
      optimizer_ = setup_.optimizer_of->shared_optimizer();
      return;
    }
    optimizer_ = with_optimizer(setup_, [&](const auto& defaults, auto of) -> std::unique_ptr<torch::optim::Optimizer> {
      return std::make_unique<typename decltype(of)::type>(groups_of(setup_, *model_), defaults);
    });
  }
  virtual void update(bool finite) {
    if (finite) optimizer_->step();
  }
  std::unique_ptr<TrainingState> scaled(std::unique_ptr<TrainingState> state) {
    if (scaler_) state->with(*scaler_);
    return state;
  }

  std::shared_ptr<Module> model_;
  Setup setup_;
  Precision precision_;
  std::optional<GradScaler> scaler_;
  std::shared_ptr<torch::optim::Optimizer> optimizer_;
};

// Training without shoal.
template <class Module>
class OneProcess : public WithTorchOptimizer<OneProcess<Module>, Module> {
  using Base = WithTorchOptimizer<OneProcess<Module>, Module>;

 public:
  OneProcess(std::shared_ptr<Module> model, const Setup& setup, const Group&) : Base(std::move(model), setup) {
    this->make_optimizer();
  }
  template <class... Arguments>
  auto call(Arguments&&... arguments) {
    const Precision::Scope scope(this->precision_, at::kCPU);
    return this->model_->forward(std::forward<Arguments>(arguments)...);
  }
  void backward(const at::Tensor& loss_sum, double weight) override { (loss_sum / weight).backward(); }
  Trained::Scope no_sync(bool) override { return nullptr; }
  Joinable& joinable() override { throw Lacks("one process joins nobody"); }
  void abandon_step() override {}
  std::unique_ptr<TrainingState> state() override { throw Lacks("one process saves with torch::save"); }
  OptimizerState optimizer_state() override { return shoal::optimizer_state(*this->optimizer_, *this->model_); }
  void load_optimizer_state(const OptimizerState& state) override {
    shoal::load_optimizer_state(*this->optimizer_, *this->model_, state);
  }
};

template <class Module>
class Ddp : public WithTorchOptimizer<Ddp<Module>, Module> {
  using Base = WithTorchOptimizer<Ddp<Module>, Module>;

 public:
  Ddp(std::shared_ptr<Module> model, const Setup& setup, const Group& group, DistributedDataParallelOptions options)
      : Base(std::move(model), setup) {
    if (setup.optimizer_first) this->make_optimizer();
    options.find_unused_parameters = setup.find_unused_parameters;
    options.static_graph = setup.static_graph;
    options.ignored = setup.ignored;
    options.precision = this->precision_;
    options.bucket_cap_mb = options.first_bucket_mb = 1e-4;  // several buckets
    parallel_.emplace(this->model_, group, options);
    if (!setup.optimizer_first) this->make_optimizer();
  }
  template <class... Arguments>
  auto call(Arguments&&... arguments) {
    return parallel_->forward(std::forward<Arguments>(arguments)...);
  }
  void backward(const at::Tensor& loss_sum, double weight) override { parallel_->backward(loss_sum, weight); }
  Trained::Scope no_sync(bool accumulate) override { return scope(parallel_->no_sync(accumulate)); }
  Joinable& joinable() override { return *parallel_; }
  void abandon_step() override { parallel_->abandon_step(); }
  std::unique_ptr<TrainingState> state() override {
    return this->scaled(std::make_unique<TrainingState>(*parallel_, *this->optimizer_));
  }
  OptimizerState optimizer_state() override { return shoal::optimizer_state(*this->optimizer_, *this->model_); }
  void load_optimizer_state(const OptimizerState& state) override {
    shoal::load_optimizer_state(*this->optimizer_, *this->model_, state);
  }

 private:
  std::optional<DistributedDataParallel<Module>> parallel_;
};

// Local SGD and its relatives. The loop uses the module and the optimizer directly.
template <class Module>
class Local : public WithTorchOptimizer<Local<Module>, Module> {
  using Base = WithTorchOptimizer<Local<Module>, Module>;

 public:
  Local(std::shared_ptr<Module> model, const Setup& setup, const Group& group, LocalUpdatesOptions options)
      : Base(std::move(model), setup) {
    this->make_optimizer();
    options.ignored = setup.ignored;
    local_.emplace(this->model_, *this->optimizer_, group, options);
  }
  template <class... Arguments>
  auto call(Arguments&&... arguments) {
    const Precision::Scope scope(this->precision_, at::kCPU);
    return this->model_->forward(std::forward<Arguments>(arguments)...);
  }
  void backward(const at::Tensor&, double) override { throw Lacks("a backward with a weight"); }
  Trained::Scope no_sync(bool) override { return nullptr; }
  void zero_grad() override { local_->zero_grad(); }
  Joinable& joinable() override { throw Lacks("a rank without a batch calls step(false)"); }
  void abandon_step() override {}
  std::unique_ptr<TrainingState> state() override { return this->scaled(std::make_unique<TrainingState>(*local_)); }
  OptimizerState optimizer_state() override { return shoal::optimizer_state(*this->optimizer_, *this->model_); }
  void load_optimizer_state(const OptimizerState& state) override {
    shoal::load_optimizer_state(*this->optimizer_, *this->model_, state);
  }

 private:
  void update(bool finite) override { local_->step(finite); }

  std::optional<LocalUpdates> local_;
};

}  // namespace shoal::test
