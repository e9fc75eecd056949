// Whole programs: two models against each other, or with one encoder.

#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>

#include "shoal/sync_batch_norm.h"
#include "tests/conformance/behaviours.h"

namespace shoal::test {
namespace {

// Batch norms see one rank's rows, while one process sees all of them; synchronised ones see the same as one process.
torch::nn::Sequential synchronised(const Bench& bench, torch::nn::Sequential model) {
  model->to(at::kDouble);
  if (bench.one_process() || bench.part().of == 1) return model;
  return torch::nn::Sequential(
      std::dynamic_pointer_cast<torch::nn::SequentialImpl>(convert_sync_batch_norm(model.ptr(), bench.group())));
}

using torch::nn::Conv2d;
using torch::nn::Conv2dOptions;
using torch::nn::ConvTranspose2d;
using torch::nn::ConvTranspose2dOptions;

torch::nn::Sequential generator() {
  torch::manual_seed(21);
  return torch::nn::Sequential(ConvTranspose2d(ConvTranspose2dOptions(4, 6, 3).bias(false)),  // 3 x 3
                               torch::nn::BatchNorm2d(6), torch::nn::ReLU(),
                               ConvTranspose2d(ConvTranspose2dOptions(6, 1, 3).stride(2).padding(1).bias(false)),  // 5
                               torch::nn::Tanh());
}

torch::nn::Sequential discriminator() {
  torch::manual_seed(22);
  return torch::nn::Sequential(Conv2d(Conv2dOptions(1, 4, 3).bias(false)),  // 3 x 3
                               torch::nn::LeakyReLU(torch::nn::LeakyReLUOptions().negative_slope(0.2)),
                               Conv2d(Conv2dOptions(4, 5, 2).bias(false)),  // 2 x 2
                               torch::nn::BatchNorm2d(5),
                               torch::nn::LeakyReLU(torch::nn::LeakyReLUOptions().negative_slope(0.2)),
                               Conv2d(Conv2dOptions(5, 1, 2).bias(false)), torch::nn::Sigmoid());
}

Setup adam(double rate) {
  Setup setup;
  setup.optimizer = torch::optim::AdamOptions(rate).betas({0.5, 0.9});
  return setup;
}

// DCGAN's order of calls: the discriminator accumulates gradients of two losses, also gets those of the generator's
// loss, and drops them at the start of its next step.
void dcgan(Bench& bench, bool through_the_module) {
  auto g = synchronised(bench, generator());
  auto d = synchronised(bench, discriminator());
  auto training_g = bench.wrap(g, adam(0.002));
  auto training_d = bench.wrap(d, adam(0.002));
  const auto zero = [&](Trained& training, torch::nn::Sequential& model) {
    through_the_module ? model->zero_grad() : training.zero_grad();
  };
  for (int64_t step = 0; step < 3; ++step) {
    zero(*training_d, d);
    const auto real = bench.share(rows(step, {12, 1, 5, 5}));
    const auto real_output = training_d->forward(real).flatten();
    auto real_loss = at::binary_cross_entropy(real_output, at::full_like(real_output, 0.9).detach());
    real_loss.backward();

    const auto noise = bench.share(rows(step + 50, {12, 4, 1, 1}));
    const auto fake = training_g->forward(noise);
    auto fake_output = training_d->forward(fake.detach()).flatten();
    auto fake_loss = at::binary_cross_entropy(fake_output, at::zeros_like(fake_output).detach());
    fake_loss.backward();
    training_d->step();

    zero(*training_g, g);
    fake_output = training_d->forward(fake).flatten();
    auto generator_loss = at::binary_cross_entropy(fake_output, at::ones_like(fake_output).detach());
    generator_loss.backward();
    training_g->step();
  }
  bench.same_parameters(*g, 1e-8);
  bench.same_parameters(*d, 1e-8);
}

// WGAN-GP: several steps of the critic with a gradient penalty, then one of the generator. With `freeze`, the critic is
// frozen meanwhile; otherwise the generator's loss leaves gradients in it.
void wgan(Bench& bench, bool freeze) {
  auto generator = std::make_shared<Perceptron>(4, 8, 6, 31);
  auto critic = std::make_shared<Perceptron>(6, 8, 1, 32);
  auto training_g = bench.wrap(generator, adam(0.01));
  auto training_c = bench.wrap(critic, adam(0.01));
  for (int64_t step = 0; step < 3; ++step) {
    for (int64_t inner = 0; inner < 2; ++inner) {
      const int64_t seed = 10 * step + inner;
      training_c->zero_grad();
      const auto real = bench.share(rows(seed, {12, 6}));
      const auto fake = training_g->forward(bench.share(rows(seed + 100, {12, 4}))).detach();
      const auto portion = bench.share(rows(seed + 200, {12, 1})).sigmoid();
      const auto between = (portion * real + (1 - portion) * fake).requires_grad_();
      const auto judged = training_c->forward(between);
      const auto gradient = torch::autograd::grad({judged}, {between}, {at::ones_like(judged)}, true, true)[0];
      const auto penalty = (gradient.norm(2, 1) - 1).pow(2).mean();
      auto loss = training_c->forward(fake).mean() - training_c->forward(real).mean() + 10 * penalty;
      loss.backward();
      training_c->step();
    }
    if (freeze) set_trainable(*critic, false);
    training_g->zero_grad();
    const auto fake = training_g->forward(bench.share(rows(step + 300, {12, 4})));
    auto loss = -training_c->forward(fake).mean();
    loss.backward();
    training_g->step();
    if (freeze) set_trainable(*critic, true);
  }
  bench.same_parameters(*generator, 1e-8);
  bench.same_parameters(*critic, 1e-8);
}

struct WithHead : Network {
  WithHead(std::shared_ptr<Perceptron> shared, int64_t out) {
    encoder = register_module("encoder", std::move(shared));
    head = register_module("head", torch::nn::Linear(3, out));
    to(at::kDouble);
  }
  using Network::forward;
  at::Tensor forward(at::Tensor x) override { return head(torch::tanh(encoder->forward(x))); }

  std::shared_ptr<Perceptron> encoder;
  torch::nn::Linear head{nullptr};
};

// An actor and a critic with one encoder, each with a wrapper and an optimizer of its own, in turns.
void one_encoder(Bench& bench) {
  const auto encoder = perceptron();
  torch::manual_seed(41);
  const auto actor = std::make_shared<WithHead>(encoder, 4);
  const auto critic = std::make_shared<WithHead>(encoder, 1);
  auto training_a = bench.wrap(actor, adam(0.01));
  auto training_c = bench.wrap(critic, adam(0.02));
  const auto turn = [&](Trained& training, int64_t step) {
    training.zero_grad();
    auto loss = training.forward(bench.batch(step)).pow(2).mean();
    loss.backward();
    training.step();
  };
  for (int64_t step = 0; step < 3; ++step) {
    turn(*training_c, 3 * step);
    turn(*training_c, 3 * step + 1);
    turn(*training_a, 3 * step + 2);
  }
  bench.same_parameters(*actor, 1e-8);
  bench.same_parameters(*critic, 1e-8);
}

}  // namespace

Behaviours programs_gans() {
  return {
      {"program_dcgan", [](Bench& bench) { dcgan(bench, true); }},
      {"program_dcgan_zeroed_by_the_optimizers", [](Bench& bench) { dcgan(bench, false); }},
      {"program_wgan_gp", [](Bench& bench) { wgan(bench, false); }},
      {"program_wgan_gp_with_a_frozen_critic", [](Bench& bench) { wgan(bench, true); }},
      {"program_actor_and_critic_with_one_encoder", one_encoder},
  };
}

}  // namespace shoal::test
