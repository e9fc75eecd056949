#pragma once
// Trainings whose strategy changes between two steps, and where they stand.

#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>

#include <memory>
#include <string>
#include <vector>

#include "shoal/training.h"
#include "tests/support/models.h"
#include "tests/support/variants.h"
#include "tests/support/world.h"

namespace shoal::replan_training {

using test::group;

// Tied and frozen weights, a buffer that training changes, and a parameter of a single element, which some ranks hold
// nothing of.
struct NetImpl : torch::nn::Module {
  explicit NetImpl(at::ScalarType dtype = at::kFloat) {
    first = register_module("first", torch::nn::Linear(12, 16));
    norm = register_module("norm", torch::nn::BatchNorm1d(16));
    frozen = register_module("frozen", torch::nn::Linear(16, 16));
    tied = register_parameter("tied", first->weight);
    gain = register_parameter("gain", at::ones({1}));
    frozen->weight.set_requires_grad(false);
    to(dtype);
  }
  at::Tensor forward(at::Tensor x) { return gain * at::matmul(torch::tanh(frozen(norm(first(x)))), tied); }

  torch::nn::Linear first{nullptr}, frozen{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  at::Tensor tied, gain;
};

inline std::shared_ptr<NetImpl> net(int seed, at::ScalarType dtype = at::kFloat) {
  torch::manual_seed(seed);
  return std::make_shared<NetImpl>(dtype);
}

inline const StrategyOptions small{{"bucket_cap_mb", "0.0005"},   {"first_bucket_mb", "0.0005"}, {"bucket_size", "100"},
                                   {"reduce_buffer_size", "100"}, {"unit_numel", "100"},         {"sync_every", "2"}};

inline OptimizerRecipe adamw() {
  return optimizer_recipe<FusedAdamW>(torch::optim::AdamWOptions(1e-2).weight_decay(0.1));
}
inline OptimizerRecipe sgd() {
  return optimizer_recipe<FusedSGD>(torch::optim::SGDOptions(0.1).momentum(0.9));
}

inline TrainingOptions options_of(const std::string& strategy) {
  test::Variant chosen{strategy, {}};
  test::add_known(chosen, small);
  return {.options = chosen.options};
}

template <class Module>
void step(Training<Module>& training, int64_t number) {
  const auto x =
      test::batch(training->group().rank(), number).to(training.module()->parameters().front().scalar_type());
  training->backward(training.forward(x).to(at::kDouble).pow(2).mean());
  training->step();
  training->zero_grad();
}

template <class Module>
void steps(Training<Module>& training, int64_t from, int64_t to) {
  for (auto number = from; number < to; ++number) step(training, number);
}

// Parameters and buffers. Collective.
template <class Module>
std::vector<at::Tensor> whole(Training<Module>& training) {
  const auto scope = training->full_parameters();
  std::vector<at::Tensor> list;
  for (const auto& parameter : training.module()->parameters()) list.push_back(parameter.detach().clone());
  for (const auto& buffer : training.module()->buffers()) list.push_back(buffer.detach().clone());
  return list;
}

// Without the buffers. Collective.
inline std::vector<at::Tensor> parameters_of(Training<NetImpl>& training) {
  auto list = whole(training);
  list.resize(training.module()->parameters().size());
  return list;
}

inline void expect_equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i], b[i])) << "tensor " << i;
}

inline void expect_equal(const OptimizerState& a, const OptimizerState& b) {
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [name, entry] : a) {
    SCOPED_TRACE(name);
    ASSERT_TRUE(b.contains(name));
    EXPECT_EQ(entry.numbers, b.at(name).numbers);
    ASSERT_EQ(entry.tensors.size(), b.at(name).tensors.size());
    for (const auto& [field, tensor] : entry.tensors)
      EXPECT_TRUE(at::equal(tensor, b.at(name).tensors.at(field))) << field;
  }
}

// Over Gloo, sums of more than two ranks depend on the borders of buckets.
inline bool sums_in_rank_order() {
  return group().transport() != "gloo" || group().size() <= 2;
}

}  // namespace shoal::replan_training
