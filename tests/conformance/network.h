#pragma once
// Modules that behaviours train. All derive from one class, so that a strategy is compiled once for all of them.

#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "shoal/forward_tensors.h"

namespace shoal::test {

using TensorPair = std::tuple<at::Tensor, at::Tensor>;
using Tensors = std::vector<at::Tensor>;
using NamedTensors = std::map<std::string, at::Tensor>;
// A caller's own type, see OutputTensors.
struct Heads {
  at::Tensor value, policy;
};

// Base of all modules, with the inputs and outputs of typical users. A module overrides the forwards that it has.
struct Network : torch::nn::Module {
  virtual at::Tensor forward(at::Tensor) { throw std::logic_error("no such forward"); }
  virtual TensorPair forward(at::Tensor, at::Tensor) { throw std::logic_error("no such forward"); }
  virtual std::tuple<at::Tensor, TensorPair> forward(at::Tensor, TensorPair) {
    throw std::logic_error("no such forward");
  }
  virtual Tensors forward(Tensors) { throw std::logic_error("no such forward"); }
  virtual NamedTensors forward(NamedTensors) { throw std::logic_error("no such forward"); }
  virtual Heads forward(at::Tensor, int) { throw std::logic_error("no such forward"); }
  virtual void forward(at::Tensor, Tensors&) { throw std::logic_error("no such forward"); }
};

// Every module starts with the same values on all ranks and in one process.
struct Perceptron : Network {
  explicit Perceptron(int64_t in = 6, int64_t hidden = 7, int64_t out = 3, int seed = 1) {
    torch::manual_seed(seed);
    first = register_module("first", torch::nn::Linear(in, hidden));
    second = register_module("second", torch::nn::Linear(hidden, hidden));
    third = register_module("third", torch::nn::Linear(hidden, out));
    to(at::kDouble);
  }
  using Network::forward;
  at::Tensor forward(at::Tensor x) override { return third(torch::tanh(second(torch::tanh(first(x))))); }

  torch::nn::Linear first{nullptr}, second{nullptr}, third{nullptr};
};

inline std::shared_ptr<Perceptron> perceptron(int seed = 1) {
  return std::make_shared<Perceptron>(6, 7, 3, seed);
}

}  // namespace shoal::test

namespace shoal {

template <>
struct OutputTensors<test::Heads> {
  static void collect(const test::Heads& heads, std::vector<at::Tensor>& into) {
    collect_tensors(heads.value, into);
    collect_tensors(heads.policy, into);
  }
};

}  // namespace shoal
