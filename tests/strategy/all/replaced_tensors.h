#pragma once
// A model whose parameters are loaded, replaced or written after it was wrapped, and the same in one process.

#include <gtest/gtest.h>
#include <torch/nn/init.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/models.h"
#include "tests/support/training.h"
#include "tests/support/world.h"

namespace shoal::test::replaced_tensors {

using torch::optim::SGD;
using torch::optim::SGDOptions;

// Model with a frozen parameter and a callback in the middle of forward.
struct NetImpl : MlpImpl {
  explicit NetImpl(int seed, at::ScalarType dtype = at::kDouble) : MlpImpl(12, 16, 5, dtype) {
    torch::manual_seed(seed);
    for (auto& parameter : parameters()) torch::nn::init::uniform_(parameter, -0.5, 0.5);
    first->bias.requires_grad_(false);
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto hidden = torch::tanh(first(x));
    if (meanwhile) meanwhile(*this);
    return third(torch::tanh(second(hidden)));
  }
  std::function<void(NetImpl&)> meanwhile;
};
TORCH_MODULE(Net);

enum class When { before_forward, in_forward, before_backward, before_step };
using Change = std::function<void(NetImpl&)>;

inline at::Tensor other_values(const at::Tensor& like) {
  return at::linspace(-0.4, 0.3, like.numel(), like.options().requires_grad(false)).view(like.sizes());
}

class ReplacedTensors : public testing::TestWithParam<std::string> {
 public:
  static Training<NetImpl> training_of(std::shared_ptr<NetImpl> net, double bucket_mb = 0.002,
                                       bool find_unused_parameters = false) {
    return Training<NetImpl>::make<SGD>(GetParam(), std::move(net), group(), SGDOptions(0.05).momentum(0.9),
                                        {.find_unused_parameters = find_unused_parameters, .bucket_mb = bucket_mb});
  }
};

// One process on all ranks' samples.
struct OneProcess {
  explicit OneProcess(int seed)
      : net(std::make_shared<NetImpl>(seed)), optimizer(trainable(), SGDOptions(0.05).momentum(0.9)) {}
  std::vector<at::Tensor> trainable() const { return distinct(net->parameters()); }

  std::shared_ptr<NetImpl> net;
  SGD optimizer;
};

// Changes both, once, in a step. Compares after every step and, right after the change, the results of an evaluation.
inline void expect_like_one_process(Training<NetImpl>& training, OneProcess& one, const Change& change, When when,
                                    int64_t changed_step) {
  const auto at_point = [&](NetImpl& net, When point, int64_t step) {
    if (when == point && step == changed_step) change(net);
  };
  for (int64_t step = 0; step < 4; ++step) {
    training.optimizer().zero_grad();
    training.zero_grad();
    one.optimizer.zero_grad();
    at_point(*training.model, When::before_forward, step);
    at_point(*one.net, When::before_forward, step);
    {
      const torch::NoGradGuard no_grad;
      const auto x = batch(0, 100 + step);
      ASSERT_LT(difference({training.forward(x)}, {one.net->forward(x)}), 1e-10) << "evaluation, step " << step;
    }
    if (when == When::in_forward && step == changed_step) training.model->meanwhile = change;
    const auto loss = mean_loss(training.forward(batch(group().rank(), step)));
    training.model->meanwhile = nullptr;
    if (when == When::in_forward && step == changed_step) one.net->meanwhile = change;
    at::Tensor whole = at::zeros({}, at::kDouble);
    for (int rank = 0; rank < group().size(); ++rank) {
      whole = whole + mean_loss(one.net->forward(batch(rank, step))) / group().size();
      one.net->meanwhile = nullptr;
    }
    at_point(*training.model, When::before_backward, step);
    at_point(*one.net, When::before_backward, step);
    try {
      whole.backward();
    } catch (const c10::Error&) {  // autograd itself refuses to go on with what was replaced: the graph has kept it
      ASSERT_EQ(when, When::before_backward);
      return;
    }
    loss.backward();
    at_point(*training.model, When::before_step, step);
    at_point(*one.net, When::before_step, step);
    training.step();
    one.optimizer.step();
    ASSERT_LT(difference(training.model->parameters(), one.net->parameters()), 1e-10) << "step " << step;
  }
}

// All biases are trained.
inline std::shared_ptr<NetImpl> trained_net() {
  auto net = std::make_shared<NetImpl>(1);
  net->first->bias.requires_grad_(true);
  return net;
}

inline void exchange(NetImpl& net) {
  const auto former = net.first->bias.data();
  net.first->bias.set_data(net.second->bias.data());
  net.second->bias.set_data(former);
  net.second->weight.set_data(net.second->weight.data().t());
}

}  // namespace shoal::test::replaced_tensors
