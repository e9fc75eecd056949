// Evaluation at any time and in any mode: between backward and step, on one rank alone, in a NoGradGuard or in
// InferenceMode. It uses the parameters of the evaluating rank's last step, and does not affect training.

#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <chrono>
#include <thread>

#include "tests/support/models.h"
#include "tests/support/training.h"
#include "tests/support/world.h"

namespace shoal::test::evaluation_test {
namespace {

constexpr int64_t steps = 4;
const auto sgd = torch::optim::SGDOptions(0.1).momentum(0.9);

const char* const strategies[] = {"ddp",  "zero1",        "zero2",         "megatron",   "megatron_in_grads",
                                  "fsdp", "fsdp_grad_op", "fsdp_no_shard", "fsdp_hybrid"};

enum class Mode { no_grad, inference };

template <class Act>
at::Tensor without_gradients(Mode mode, const Act& act) {
  if (mode == Mode::inference) {
    const c10::InferenceMode guard;
    return act();
  }
  const torch::NoGradGuard guard;
  return act();
}

std::string name_of(Mode mode) {
  return mode == Mode::inference ? "InferenceMode" : "NoGradGuard";
}

// Makes ranks arrive one after the other.
void arrive_late() {
  std::this_thread::sleep_for(std::chrono::milliseconds(30 * group().rank()));
}

// Outputs of one process on all ranks' batches: before each step, and after the last one.
std::vector<at::Tensor> expected_outputs() {
  auto model = seeded(1);
  torch::optim::SGD optimizer(model->parameters(), sgd);
  std::vector<at::Tensor> outputs;
  for (int64_t step = 0; step < steps; ++step) {
    for (int rank = 0; rank < group().size(); ++rank) {
      (mean_loss(model->forward(batch(rank, step))) / group().size()).backward();
    }
    outputs.push_back(model->forward(batch(0, 99)).detach());
    optimizer.step();
    optimizer.zero_grad();
  }
  outputs.push_back(model->forward(batch(0, 99)).detach());
  return outputs;
}

Training<MlpImpl> make(const std::string& strategy) {
  return Training<MlpImpl>::make<torch::optim::SGD>(strategy, seeded(1).ptr(), group(), sgd, {.bucket_mb = 0.0005});
}

// Calls the module's own forward, on every rank or on one.
void evaluate_before_each_step(const std::string& strategy, Mode mode, bool everywhere) {
  SCOPED_TRACE(strategy + ", " + name_of(mode) + (everywhere ? ", on every rank" : ", on the last rank"));
  const auto expected = expected_outputs();
  auto training = make(strategy);
  const auto look = [&](int64_t step) {
    const auto output = without_gradients(mode, [&] { return training.model->forward(batch(0, 99)).clone(); });
    EXPECT_LT(difference({output}, {expected[step]}), 1e-12) << "step " << step;
  };
  for (int64_t step = 0; step < steps; ++step) {
    mean_loss(training.forward(batch(group().rank(), step))).backward();
    if (everywhere) arrive_late();
    if (everywhere || group().rank() == group().size() - 1) {
      if (!everywhere) std::this_thread::sleep_for(std::chrono::milliseconds(30));
      look(step);
    }
    training.step();
    training.zero_grad();
  }
  look(steps);
}

TEST(Evaluation, FSDP21_between_backward_and_step_it_sees_the_parameters_of_the_last_step) {
  for (const auto* strategy : strategies) {
    for (const auto mode : {Mode::no_grad, Mode::inference}) evaluate_before_each_step(strategy, mode, true);
  }
}

TEST(Evaluation, FSDP21_between_backward_and_step_one_rank_may_evaluate_alone) {
  for (const auto* strategy : strategies) {
    for (const auto mode : {Mode::no_grad, Mode::inference}) evaluate_before_each_step(strategy, mode, false);
  }
}

// As an average of the weights that is shown and taken out again: first through data(), then with a version of its own.
TEST(Evaluation, FSDP21_one_rank_may_show_other_weights_and_put_its_own_back) {
  const auto expected = expected_outputs();
  for (const std::string strategy : strategies) {
    SCOPED_TRACE(strategy);
    if (strategy.starts_with("fsdp") && group().transport() != "host") continue;  // no rank has all parameters
    auto training = make(strategy);
    const auto show_others = [&](bool by_data) {
      if (group().rank() != 0) return;
      const torch::NoGradGuard no_grad;
      std::vector<at::Tensor> own;
      for (auto parameter : training.model->parameters()) {
        own.push_back(parameter.detach().clone());
        (by_data ? parameter.tensor_data() : parameter).fill_(7);
      }
      EXPECT_GT(difference({training.model->forward(batch(0, 99))}, {expected[0]}), 0.1);
      const auto parameters = training.model->parameters();
      for (size_t i = 0; i < own.size(); ++i) {
        (by_data ? parameters[i].tensor_data() : at::Tensor(parameters[i])).copy_(own[i]);
      }
    };
    for (int64_t step = 0; step < steps; ++step) {
      mean_loss(training.forward(batch(group().rank(), step))).backward();
      show_others(step % 2 == 0);
      training.step();
      training.zero_grad();
      show_others(step % 2 == 0);
    }
    const torch::NoGradGuard no_grad;
    EXPECT_LT(difference({training.model->forward(batch(0, 99))}, {expected[steps]}), 1e-12);
  }
}

// Evaluates through the wrapper, alternating with training.
TEST(Evaluation, FSDP21_in_either_mode_it_leaves_training_as_it_is) {
  const auto expected = expected_outputs();
  for (const auto* strategy : strategies) {
    for (const auto mode : {Mode::no_grad, Mode::inference}) {
      SCOPED_TRACE(std::string(strategy) + ", " + name_of(mode));
      auto training = make(strategy);
      for (int64_t step = 0; step < steps; ++step) {
        const auto output = without_gradients(mode, [&] { return training.forward(batch(0, 99)).clone(); });
        EXPECT_LT(difference({output}, {expected[step]}), 1e-12) << "step " << step;
        mean_loss(training.forward(batch(group().rank(), step))).backward();
        training.step();
        training.zero_grad();
      }
      const torch::NoGradGuard no_grad;
      EXPECT_LT(difference({training.forward(batch(0, 99))}, {expected[steps]}), 1e-12);
    }
  }
}

}  // namespace
}  // namespace shoal::test::evaluation_test
