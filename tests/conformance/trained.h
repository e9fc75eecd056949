#pragma once
// Module under a strategy together with its optimizer, as a training loop uses them.

#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adam.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

#include "shoal/optimizer_state.h"
#include "shoal/precision.h"
#include "tests/conformance/network.h"

namespace shoal {
class Joinable;
class TrainingState;
}  // namespace shoal

namespace shoal::test {

using ParamGroups = std::vector<torch::optim::OptimizerParamGroup>;

class Trained;

// Requirements of a behaviour on a training. A strategy meets them in its own way, or throws Lacks.
struct Setup {
  std::variant<torch::optim::SGDOptions, torch::optim::AdamOptions> optimizer =
      torch::optim::SGDOptions(0.1).momentum(0.9);
  std::function<ParamGroups()> groups{};      // none: one group of all parameters
  Trained* optimizer_of = nullptr;            // its optimizer includes these parameters, and steps them
  double clip = 0;                            // maximum norm of all gradients together, by option or by call
  std::optional<GradScalerOptions> scaler{};  // loss scaler; arithmetic is in float16 then
  bool find_unused_parameters = false;
  bool static_graph = false;           // if the strategy has it
  bool optimizer_first = false;        // makes the optimizer before the wrapper
  std::vector<std::string> ignored{};  // names of parameters and buffers
};

// Error of a strategy without such a call. The text names the alternative.
struct Lacks : std::logic_error {
  using std::logic_error::logic_error;
};

class Trained {
 public:
  virtual ~Trained() = default;

  // The wrapper's forward, or the module's own if the strategy has no wrapper.
  virtual at::Tensor forward(at::Tensor x) = 0;
  virtual TensorPair forward(at::Tensor x, at::Tensor y) = 0;
  virtual std::tuple<at::Tensor, TensorPair> forward(at::Tensor x, TensorPair state) = 0;
  virtual Tensors forward(Tensors list) = 0;
  virtual NamedTensors forward(NamedTensors named) = 0;
  virtual Heads forward(at::Tensor x, int number) = 0;
  virtual void forward(at::Tensor x, Tensors& into) = 0;
  virtual void backward(const at::Tensor& loss_sum, double weight) = 0;
  // Type-erased scope of the strategy.
  using Scope = std::shared_ptr<void>;
  virtual Scope no_sync(bool accumulate = true) = 0;
  // step() of the optimizer's own type: unscales and clips as given in Setup. Returns whether parameters were updated.
  virtual bool step() = 0;
  virtual void zero_grad() = 0;
  // The same object as a libtorch optimizer.
  virtual torch::optim::Optimizer& optimizer() = 0;
  // Optimizer that steps several modules; see Setup.
  virtual std::shared_ptr<torch::optim::Optimizer> shared_optimizer() {
    throw Lacks("one optimizer over two wrapped modules: make one module of them");
  }
  // Clips between backward and step, with the strategy's own call; returns the norm before.
  virtual double clip(double max_norm) = 0;
  virtual at::Tensor scale(const at::Tensor& loss) = 0;
  virtual double loss_scale() = 0;
  virtual Joinable& joinable() = 0;
  // Call before the module is used without this object; no effect for most strategies.
  virtual void unwrap() {}
  virtual void abandon_step() = 0;                     // after an exception on this rank
  virtual std::unique_ptr<TrainingState> state() = 0;  // for checkpoints
  virtual OptimizerState optimizer_state() = 0;
  virtual void load_optimizer_state(const OptimizerState& state) = 0;
};

namespace detail {

template <class Defaults>
struct OptimizerOf;
template <>
struct OptimizerOf<torch::optim::SGDOptions> {
  using type = torch::optim::SGD;
};
template <>
struct OptimizerOf<torch::optim::AdamOptions> {
  using type = torch::optim::Adam;
};

}  // namespace detail

// make(defaults, Of<optimizer's class>).
template <class Local>
struct Of {
  using type = Local;
};
template <class Make>
auto with_optimizer(const Setup& setup, const Make& make) {
  return std::visit(
      [&](const auto& defaults) {
        return make(defaults, Of<typename detail::OptimizerOf<std::decay_t<decltype(defaults)>>::type>());
      },
      setup.optimizer);
}

// Without repetitions: libtorch lists a tied parameter under each of its names, and its optimizers update it as often.
std::vector<at::Tensor> distinct(const std::vector<at::Tensor>& parameters);
ParamGroups groups_of(const Setup& setup, const torch::nn::Module& module);
// Gradients that are defined.
std::vector<at::Tensor> gradients_of(const torch::nn::Module& module);

// Sets requires_grad of all of a module's parameters.
void set_trainable(torch::nn::Module& module, bool trainable);

// Wraps one of shoal's scopes.
template <class NoSync>
Trained::Scope scope(NoSync&& no_sync) {
  return std::make_shared<std::decay_t<NoSync>>(std::forward<NoSync>(no_sync));
}

// Overloads of forward, through a template of the strategy: `call(arguments...)`.
template <class Self, class Module>
class Callable : public Trained {
 public:
  at::Tensor forward(at::Tensor x) override { return self().call(std::move(x)); }
  TensorPair forward(at::Tensor x, at::Tensor y) override { return other<TensorPair>(std::move(x), std::move(y)); }
  std::tuple<at::Tensor, TensorPair> forward(at::Tensor x, TensorPair state) override {
    return other<std::tuple<at::Tensor, TensorPair>>(std::move(x), std::move(state));
  }
  Tensors forward(Tensors list) override { return other<Tensors>(std::move(list)); }
  NamedTensors forward(NamedTensors named) override { return other<NamedTensors>(std::move(named)); }
  Heads forward(at::Tensor x, int number) override { return other<Heads>(std::move(x), number); }
  void forward(at::Tensor x, Tensors& into) override { other<void>(std::move(x), into); }

 private:
  Self& self() { return static_cast<Self&>(*this); }
  template <class Result, class... Arguments>
  Result other(Arguments&&... arguments) {
    if constexpr (std::is_base_of_v<Network, Module>) {
      return self().call(std::forward<Arguments>(arguments)...);
    } else {
      throw std::logic_error("the module has no such forward");
    }
  }
};

}  // namespace shoal::test
