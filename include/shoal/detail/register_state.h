#pragma once
// Registration of an optimizer's per-parameter state, for checkpoints and sharded strategies.

#include <torch/optim/optimizer.h>

#include <concepts>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>

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

}  // namespace shoal
