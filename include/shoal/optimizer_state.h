#pragma once
// State of optimizers: registration of a parameter's, for checkpoints and sharded strategies, and the full state by
// parameter name, independent of how it is sharded over ranks.

#include <torch/optim/optimizer.h>

#include <concepts>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>

#include "shoal/detail/module_ref.h"

namespace shoal {

// State of one parameter under the names of PyTorch's state dicts: "step", "exp_avg", "momentum_buffer", ... The
// tensors are the state's own, not copies.
struct NamedState {
  std::map<std::string, at::Tensor> tensors;
  std::map<std::string, double> numbers;
};

namespace detail {

// Visitor that collects the fields of a state.
class StateReader {
 public:
  void operator()(const std::string& name, const at::Tensor& tensor) {
    if (tensor.defined()) named.tensors[name] = tensor;
  }
  template <class Number>
  requires std::integral<Number> || std::floating_point<Number>
  void operator()(const std::string& name, const Number& number) { named.numbers[name] = static_cast<double>(number); }
  void optional(const std::string& name, const at::Tensor& tensor) { (*this)(name, tensor); }

  NamedState named;
};

// Visitor that fills a new state; throws UsageError for missing and unknown fields.
class StateWriter {
 public:
  StateWriter(const NamedState& named, std::string optimizer) : named_(named), optimizer_(std::move(optimizer)) {}

  void operator()(const std::string& name, at::Tensor& tensor) {
    optional(name, tensor);
    if (!tensor.defined()) missing(name);
  }
  template <class Number>
  requires std::integral<Number> || std::floating_point<Number>
  void operator()(const std::string& name, Number& number) {
    const auto found = named_.numbers.find(name);
    if (found == named_.numbers.end()) missing(name);
    number = static_cast<Number>(found->second);
    used_.insert(name);
  }
  void optional(const std::string& name, at::Tensor& tensor) {
    const auto found = named_.tensors.find(name);
    if (found == named_.tensors.end()) return;
    tensor = found->second;
    used_.insert(name);
  }
  void finish() const;

 private:
  [[noreturn]] void missing(const std::string& name) const;

  const NamedState& named_;
  std::string optimizer_;
  std::set<std::string> used_;
};

struct StateKind {
  std::function<bool(const torch::optim::Optimizer&)> is_kept_by;
  std::function<bool(const torch::optim::OptimizerParamState&)> matches;
  std::function<NamedState(const torch::optim::OptimizerParamState&)> read;
  std::function<std::unique_ptr<torch::optim::OptimizerParamState>(const NamedState&, const std::string& optimizer)>
      make;
};

template <std::derived_from<torch::optim::Optimizer> Optimizer,
          std::derived_from<torch::optim::OptimizerParamState> State, class Fields>
StateKind state_kind(Fields fields) {
  return {
      [](const torch::optim::Optimizer& optimizer) { return dynamic_cast<const Optimizer*>(&optimizer) != nullptr; },
      [](const torch::optim::OptimizerParamState& state) { return dynamic_cast<const State*>(&state) != nullptr; },
      [fields](const torch::optim::OptimizerParamState& state) {
        StateReader reader;
        fields(dynamic_cast<const State&>(state), reader);
        return reader.named;
      },
      [fields](const NamedState& named, const std::string& optimizer) {
        auto state = std::make_unique<State>();
        StateWriter writer(named, optimizer);
        fields(*state, writer);
        writer.finish();
        return std::unique_ptr<torch::optim::OptimizerParamState>(std::move(state));
      },
  };
}

void add_state_kind(StateKind kind);

}  // namespace detail

// Registers the fields of the state of `Optimizer` and of classes derived from it. `fields` is called with a state and
// a visitor, both to read and to write:
//
//   shoal::register_state<MyOptimizer, MyParamState>([](auto& state, auto& field) {
//     field("step", state.step());                         // an integer or floating-point number
//     field("exp_avg", state.exp_avg());                   // a tensor
//     field.optional("max_exp_avg", state.max_exp_avg());  // a tensor that may be undefined
//   });
//
// libtorch's SGD, Adam, AdamW, RMSprop and Adagrad and shoal's optimizers are registered. Later registrations take
// precedence. Thread-safe. Not collective.
template <class Optimizer, class State, class Fields>
void register_state(Fields fields) {
  detail::add_state_kind(detail::state_kind<Optimizer, State>(std::move(fields)));
}

// State by parameter name (the first name of a tied parameter). Every trainable parameter of the optimizer has an
// entry, which is empty if it was never updated; with a module as source of the names, every one that is the module's.
// Tensors that follow the parameter (moments) have its shape. Sharded strategies with 16-bit parameters store the
// float32 copy as "main_param".
//
// An optimizer with a loss scaler stores it under grad_scaler_key: numbers "scale", "good_steps", "hysteresis_left".
//
// State from any strategy and number of ranks can be loaded by any other with the same optimizer. If only one of the
// two has a scaler there is a warning: the loaded scaler is dropped, or the optimizer's keeps its initial state.
using OptimizerState = std::map<std::string, NamedState>;

inline constexpr const char* grad_scaler_key = ".grad_scaler";  // parameter names never begin with a dot

// Of loaded state that has its parameter's shape and is floating-point. of_parameters: that of what the optimizer
// updates, as in PyTorch's load_state_dict(); kept: that of the loaded tensor.
enum class StateDtypes { of_parameters, kept };

// State of an optimizer that is not sharded: a copy, and its inverse. `module`: source of the parameter names, a
// module, its holder or a pointer to it; where the optimizer trains several modules, call them for each.
// load_optimizer_state throws UsageError, which names the parameter, for entries that are missing, extra or of another
// shape; nothing changes then.
OptimizerState optimizer_state(const torch::optim::Optimizer& optimizer, detail::ModuleRef module);
void load_optimizer_state(torch::optim::Optimizer& optimizer, detail::ModuleRef module, const OptimizerState& state,
                          StateDtypes dtypes = StateDtypes::of_parameters);

}  // namespace shoal
