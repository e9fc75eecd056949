// Blocks that are recomputed in backward (activation checkpoints), by a backward of their own inside the loop's.

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "tests/conformance/behaviours.h"

namespace shoal::test {
namespace {

using Block = std::function<at::Tensor(const at::Tensor&)>;

struct Recompute : torch::autograd::Function<Recompute> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const Block* block) {
    context->save_for_backward({x});
    context->saved_data["block"] = reinterpret_cast<int64_t>(block);
    return (*block)(x);
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* context,
                                               const torch::autograd::tensor_list& grads) {
    const auto input = context->get_saved_variables()[0].detach().requires_grad_();
    const auto& block = *reinterpret_cast<const Block*>(context->saved_data["block"].toInt());
    const torch::AutoGradMode enabled(true);
    torch::autograd::backward({block(input)}, {grads[0]});
    return {input.grad(), at::Tensor()};
  }
};

// The block of the last layers is recomputed: its gradients are the first of a backward, and come from an inner one.
struct RecomputedEnd : Perceptron {
  using Network::forward;
  at::Tensor forward(at::Tensor x) override { return Recompute::apply(first(x), &block); }
  Block block = [this](const at::Tensor& x) { return third(torch::tanh(second(torch::tanh(x)))); };
};

// The block's gradients come twice.
struct RecomputedTwice : Perceptron {
  using Network::forward;
  at::Tensor forward(at::Tensor x) override {
    return third(Recompute::apply(Recompute::apply(first(x), &block), &block));
  }
  Block block = [this](const at::Tensor& x) { return torch::tanh(second(torch::tanh(x))); };
};

// The last layer belongs to the loss, which the loop recomputes.
struct Body : Perceptron {
  using Network::forward;
  at::Tensor forward(at::Tensor x) override { return torch::tanh(second(torch::tanh(first(x)))); }
};

double rows_of(const at::Tensor& x) {
  return static_cast<double>(x.size(0));
}

void weighted_end(Bench& bench, int64_t micros) {
  auto model = std::make_shared<RecomputedEnd>();
  auto training = bench.wrap(model);
  for (int64_t step = 0; step < 3; ++step) {
    training->zero_grad();
    for (int64_t micro = 0; micro < micros; ++micro) {
      const auto local = training->no_sync(micro + 1 < micros);
      const auto x = bench.batch(10 * step + micro);
      const double all = bench.one_process() ? static_cast<double>(micros) : 1;
      training->backward(training->forward(x).pow(2).sum(), rows_of(x) * all);
    }
    training->step();
  }
  bench.same_parameters(*model);
}

// What a node of another backward does, as one that caches gradients of a large batch.
struct Within : torch::autograd::Function<Within> {
  using Act = std::function<void()>;
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const Act* act) {
    context->saved_data["act"] = reinterpret_cast<int64_t>(act);
    return x.clone();
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* context,
                                               const torch::autograd::tensor_list& grads) {
    const torch::AutoGradMode enabled(true);
    (*reinterpret_cast<const Act*>(context->saved_data["act"].toInt()))();
    return {grads[0], at::Tensor()};
  }
};

void micro_batches_within(Bench& bench, bool weighted) {
  constexpr int64_t micros = 2;
  auto model = std::make_shared<Perceptron>();
  auto training = bench.wrap(model);
  for (int64_t step = 0; step < 3; ++step) {
    training->zero_grad();
    int64_t micro = 0;
    const Within::Act act = [&] {
      const auto x = bench.batch(10 * step + micro);
      const double all = bench.one_process() ? static_cast<double>(micros) : 1;
      const auto local = training->no_sync(++micro < micros);
      weighted ? training->backward(training->forward(x).pow(2).sum(), rows_of(x) * all)
               : (loss_of(training->forward(x)) / static_cast<double>(micros)).backward();
    };
    auto y = torch::ones({1}, at::TensorOptions(at::kDouble).requires_grad(true));
    for (int64_t i = 0; i < micros; ++i) y = Within::apply(y, &act);
    y.sum().backward();
    training->step();
  }
  bench.same_parameters(*model);
}

void steps_within(Bench& bench, bool weighted) {
  auto model = std::make_shared<Perceptron>();
  auto training = bench.wrap(model);
  for (int64_t step = 0; step < 3; ++step) {
    const Within::Act act = [&] {
      training->zero_grad();
      const auto x = bench.batch(step);
      weighted ? training->backward(training->forward(x).pow(2).sum(), rows_of(x))
               : loss_of(training->forward(x)).backward();
      training->step();
    };
    Within::apply(torch::ones({1}, at::TensorOptions(at::kDouble).requires_grad(true)), &act).sum().backward();
  }
  bench.same_parameters(*model);
}

void recomputed_loss(Bench& bench, const Setup& setup, bool weighted) {
  auto model = std::make_shared<Body>();
  auto training = bench.wrap(model, setup);
  const Block loss = [&](const at::Tensor& x) {
    const auto squares = model->third(x).pow(2);
    return weighted ? squares.sum() : squares.mean();
  };
  for (int64_t step = 0; step < 3; ++step) {
    training->zero_grad();
    const auto x = bench.batch(step);
    const auto value = Recompute::apply(training->forward(x), &loss);
    weighted ? training->backward(value, rows_of(x)) : value.backward();
    training->step();
  }
  bench.same_parameters(*model);
}

}  // namespace

Behaviours recomputing() {
  return {
      {"recomputed_last_layers",
       [](Bench& bench) {
         auto model = std::make_shared<RecomputedEnd>();
         auto training = bench.wrap(model);
         train(bench, *training, 0, 3);
         bench.same_parameters(*model);
       }},
      {"recomputed_last_layers_with_weights", [](Bench& bench) { weighted_end(bench, 1); }},
      {"recomputed_last_layers_with_weights_accumulated", [](Bench& bench) { weighted_end(bench, 2); }},
      {"recomputed_last_layers_and_unequal_numbers_of_batches",
       [](Bench& bench) { train_joined(bench, std::make_shared<RecomputedEnd>()); }},
      {"a_block_recomputed_twice",
       [](Bench& bench) {
         auto model = std::make_shared<RecomputedTwice>();
         auto training = bench.wrap(model);
         train(bench, *training, 0, 3);
         bench.same_parameters(*model);
       }},
      {"a_loss_recomputed_in_parts",
       [](Bench& bench) {
         auto model = std::make_shared<Body>();
         auto training = bench.wrap(model);
         const Block loss = [&](const at::Tensor& x) { return loss_of(model->third(x)) / 2; };
         for (int64_t step = 0; step < 3; ++step) {
           training->zero_grad();
           const auto parts = training->forward(bench.batch(step)).chunk(2);
           (Recompute::apply(parts[0], &loss) + Recompute::apply(parts[1], &loss)).backward();
           training->step();
         }
         bench.same_parameters(*model);
       }},
      {"a_recomputed_loss", [](Bench& bench) { recomputed_loss(bench, {}, false); }},
      {"micro_batches_within_another_backward", [](Bench& bench) { micro_batches_within(bench, false); }},
      {"micro_batches_with_weights_within_another_backward", [](Bench& bench) { micro_batches_within(bench, true); }},
      {"steps_within_another_backward", [](Bench& bench) { steps_within(bench, false); }},
      {"steps_with_weights_within_another_backward", [](Bench& bench) { steps_within(bench, true); }},
      {"a_recomputed_loss_with_weights", [](Bench& bench) { recomputed_loss(bench, {}, true); }},
      {"a_recomputed_loss_and_clipping",
       [](Bench& bench) {
         Setup setup;
         setup.clip = 0.05;
         recomputed_loss(bench, setup, false);
       }},
  };
}

}  // namespace shoal::test
