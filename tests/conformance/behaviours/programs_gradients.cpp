// Whole programs that change or use gradients between backward and step.

#include <torch/nn/functional/loss.h>
#include <torch/nn/utils/clip_grad.h>

#include <cmath>
#include <map>

#include "tests/conformance/behaviours.h"

namespace shoal::test {
namespace {

// Q-learning: gradients are clamped element by element, and a target network follows.
void dqn(Bench& bench) {
  auto policy = std::make_shared<Perceptron>(6, 8, 3, 61), target = std::make_shared<Perceptron>(6, 8, 3, 61);
  Setup setup;
  setup.optimizer = torch::optim::AdamOptions(0.01);
  auto training = bench.wrap(policy, setup);
  target->eval();
  for (int64_t step = 0; step < 6; ++step) {
    const auto states = bench.batch(step), next_states = bench.batch(step + 100);
    const auto rewards = bench.share(rows(step + 200, {12, 1}));
    const auto actions = bench.share(rows(step + 300, {12, 1}).abs().mul(2).to(at::kLong).clamp(0, 2));
    at::Tensor expected;
    {
      const torch::NoGradGuard no_grad;
      expected = rewards + 0.9 * std::get<0>(target->forward(next_states).max(1, /*keepdim=*/true));
    }
    auto loss = torch::nn::functional::smooth_l1_loss(training->forward(states).gather(1, actions), expected);
    training->zero_grad();
    loss.backward();
    bench.together([&] {
      for (auto& param : policy->parameters()) param.grad().data().clamp_(-0.01, 0.01);
    });
    training->step();
    if (step % 2 == 1) {
      const torch::NoGradGuard no_grad;
      const auto from = policy->named_parameters();
      for (auto& entry : target->named_parameters()) entry.value().copy_(from[entry.key()]);
    }
  }
  bench.same_parameters(*policy, 1e-8);
}

// Logs norms by layer, and skips a step whose gradients are too large.
void skipping(Bench& bench) {
  auto model = perceptron();
  auto training = bench.wrap(model);
  std::map<std::string, double> log;
  int64_t skipped = 0;
  for (int64_t step = 0; step < 6; ++step) {
    const double size = step == 3 ? 100 : 1;
    for (int64_t micro = 0; micro < 2; ++micro) {
      const auto local = training->no_sync(micro == 0);
      (size * loss_of(training->forward(bench.batch(2 * step + micro))) / 2).backward();
    }
    double norm = 0;
    bench.together([&] {
      double total = 0;
      for (const auto& entry : model->named_parameters()) {
        if (!entry.value().grad().defined()) continue;
        log[entry.key()] = entry.value().grad().norm(2).item<double>();
        total += log[entry.key()] * log[entry.key()];
      }
      norm = std::sqrt(total);
    });
    bench.same("norm", norm);
    if (norm > 5) {
      ++skipped;
      model->zero_grad();
      continue;
    }
    training->step();
    training->zero_grad();
  }
  bench.same("skipped", static_cast<double>(skipped));
  bench.same_parameters(*model);
}

// Foret et al. 2021: moves to the worst nearby point along the gradient, and back for the update with the gradient
// there.
void sharpness_aware(Bench& bench) {
  auto model = perceptron();
  auto training = bench.wrap(model);
  for (int64_t step = 0; step < 4; ++step) {
    training->zero_grad();
    loss_of(training->forward(bench.batch(step))).backward();
    std::vector<at::Tensor> here;
    bench.together([&] {
      const torch::NoGradGuard no_grad;
      at::Tensor squares = at::zeros({}, at::kDouble);
      for (const auto& parameter : model->parameters()) squares = squares + parameter.grad().pow(2).sum();
      std::vector<at::Tensor> there;
      for (const auto& parameter : model->parameters()) {
        here.push_back(parameter.detach().clone());
        there.push_back(parameter + parameter.grad() * (0.05 / squares.sqrt()));
      }
      bench.meet();
      auto parameters = model->parameters();
      for (size_t i = 0; i < parameters.size(); ++i) parameters[i].copy_(there[i]);
    });
    training->zero_grad();
    loss_of(training->forward(bench.batch(step))).backward();
    {
      const torch::NoGradGuard no_grad;
      auto parameters = model->parameters();
      for (size_t i = 0; i < parameters.size(); ++i) parameters[i].copy_(here[i]);
    }
    training->step();
  }
  bench.same_parameters(*model);
}

}  // namespace

Behaviours programs_gradients() {
  return {
      {"program_dqn_with_clamped_gradients", dqn},
      {"program_that_logs_norms_and_skips_steps", skipping},
      {"program_sharpness_aware", sharpness_aware},
  };
}

}  // namespace shoal::test
