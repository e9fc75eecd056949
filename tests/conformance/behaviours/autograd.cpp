// Uses of autograd beyond loss.backward().

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "tests/conformance/behaviours.h"

namespace shoal::test {
namespace {

// Trains with a loss computed from the training, the model and the step.
template <class Loss>
void with_loss(Bench& bench, const Loss& loss, const Setup& setup = {}) {
  auto model = perceptron();
  auto training = bench.wrap(model, setup);
  for (int64_t step = 0; step < 3; ++step) {
    training->zero_grad();
    at::Tensor value = loss(*training, *model, step);
    value.backward();
    training->step();
  }
  bench.same_parameters(*model);
}

// Squared norm of d output / d input, row by row.
at::Tensor penalty(const at::Tensor& output, const at::Tensor& input) {
  const auto gradient = torch::autograd::grad({output.sum()}, {input}, {}, true, true)[0];
  return (gradient.norm(2, 1) - 1).pow(2).mean();
}

at::Tensor wanting_gradients(at::Tensor x) {
  return x.detach().requires_grad_();
}

// Function without a gradient for its second input.
struct First : torch::autograd::Function<First> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& a, const at::Tensor&) { return a * 2; }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext*, torch::autograd::tensor_list grads) {
    return {grads[0] * 2, at::Tensor()};
  }
};

struct Undefined : Perceptron {
  using Perceptron::forward;
  at::Tensor forward(at::Tensor x) override {
    return First::apply(Perceptron::forward(x), third->bias.expand({x.size(0), 3}));
  }
};

}  // namespace

Behaviours autograd() {
  return {
      {"a_gradient_penalty",
       [](Bench& bench) {
         with_loss(bench, [&](Trained& t, auto&, int64_t step) {
           const auto x = wanting_gradients(bench.batch(step));
           const auto output = t.forward(x);
           return loss_of(output) + penalty(output, x);
         });
       }},
      {"a_gradient_penalty_alone",
       [](Bench& bench) {
         with_loss(bench, [&](Trained& t, auto&, int64_t step) {
           const auto x = wanting_gradients(bench.batch(step));
           return penalty(t.forward(x), x) + 0 * t.forward(x).sum();
         });
       }},
      {"a_gradient_penalty_of_the_module",
       [](Bench& bench) {
         with_loss(bench, [&](Trained& t, auto& model, int64_t step) {
           const auto x = wanting_gradients(bench.batch(step + 9));
           const auto extra = penalty(model.forward(x), x);
           return loss_of(t.forward(bench.batch(step))) + extra;
         });
       }},
      {"a_gradient_penalty_with_a_static_graph",
       [](Bench& bench) {
         Setup setup;
         setup.static_graph = true;
         with_loss(
             bench,
             [&](Trained& t, auto&, int64_t step) {
               const auto x = wanting_gradients(bench.batch(step));
               const auto output = t.forward(x);
               return loss_of(output) + penalty(output, x);
             },
             setup);
       }},
      {"a_penalty_on_the_parameters_gradients",
       [](Bench& bench) {
         with_loss(bench, [&](Trained& t, auto& model, int64_t step) {
           auto whole = rows(step, {12, 6});  // on every rank
           const auto loss = loss_of(t.forward(whole));
           at::Tensor sum = loss;
           for (const auto& gradient : torch::autograd::grad({loss}, model.parameters(), {}, true, true)) {
             sum = sum + gradient.pow(2).sum();
           }
           return sum;
         });
       }},
      {"autograd_grad_of_the_input_before_backward",
       [](Bench& bench) {
         with_loss(bench, [&](Trained& t, auto&, int64_t step) {
           auto x = wanting_gradients(bench.batch(step));
           const auto loss = loss_of(t.forward(x));
           const auto gradient = torch::autograd::grad({loss}, {x}, {}, true)[0];
           bench.check(gradient.isfinite().all().item<bool>(), "no gradient of the input");
           return loss;
         });
       }},
      {"autograd_grad_alone_then_a_step",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         train(bench, *training, 0, 1);
         auto x = wanting_gradients(rows(1, {12, 6}));
         bench.same("gradient", torch::autograd::grad({loss_of(training->forward(x))}, {x})[0]);
         train(bench, *training, 2, 4);
         bench.same_parameters(*model);
       }},
      {"backward_of_some_inputs_alone",
       [](Bench& bench) {
         Setup setup;
         setup.find_unused_parameters = true;
         auto model = perceptron();
         auto training = bench.wrap(model, setup);
         for (int64_t step = 0; step < 3; ++step) {
           training->zero_grad();
           const auto loss = loss_of(training->forward(bench.batch(step)));
           loss.backward({}, {}, false, {{model->third->weight, model->third->bias}});
           training->step();
         }
         bench.same_parameters(*model);
       }},
      {"backward_with_create_graph",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         for (int64_t step = 0; step < 3; ++step) {
           training->zero_grad();
           loss_of(training->forward(bench.batch(step))).backward({}, true, true);
           training->step();
         }
         training->zero_grad();
         bench.same_parameters(*model);
       }},
      {"backward_with_a_gradient_given",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         for (int64_t step = 0; step < 3; ++step) {
           training->zero_grad();
           const auto output = training->forward(bench.batch(step));
           output.backward(2 * output.detach() / static_cast<double>(output.numel()));
           training->step();
         }
         bench.same_parameters(*model);
       }},
      {"backward_of_several_roots",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         for (int64_t step = 0; step < 3; ++step) {
           training->zero_grad();
           const auto output = training->forward(bench.batch(step));
           torch::autograd::backward({output.pow(2).mean(), output.abs().mean()});
           training->step();
         }
         bench.same_parameters(*model);
       }},
      {"gradients_of_activations_retained",
       [](Bench& bench) {
         with_loss(bench, [&](Trained& t, auto&, int64_t step) {
           auto output = t.forward(bench.batch(step));
           output.retain_grad();
           auto loss = loss_of(output);
           loss.register_hook([&bench, output](const at::Tensor&) {
             bench.check(!output.grad().defined(), "the gradient was there before");
           });
           return loss;
         });
       }},
      {"hooks_on_activations",
       [](Bench& bench) {
         with_loss(bench, [&](Trained& t, auto&, int64_t step) {
           auto output = t.forward(bench.batch(step));
           output.register_hook([](const at::Tensor& gradient) { return gradient * 0.5; });
           return loss_of(output);
         });
       }},
      {"hooks_on_parameters_before_wrapping",
       [](Bench& bench) {
         auto model = perceptron();
         model->second->weight.register_hook([](const at::Tensor& gradient) { return gradient * 0.5; });
         auto training = bench.wrap(model);
         train(bench, *training, 0, 3);
         bench.same_parameters(*model);
       }},
      {"hooks_on_parameters_after_wrapping",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         train(bench, *training, 0, 1);
         model->second->weight.register_hook([](const at::Tensor& gradient) { return gradient * 0.5; });
         train(bench, *training, 1, 4);
         bench.same_parameters(*model);
       }},
      {"hooks_on_parameters_that_look",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         int64_t seen = 0;
         for (auto& parameter : model->parameters()) {
           parameter.register_hook([&seen](const at::Tensor& gradient) { seen += gradient.numel(); });
         }
         train(bench, *training, 0, 3);
         bench.check(seen == 3 * (42 + 7 + 49 + 7 + 21 + 3), "hooks have seen " + std::to_string(seen));
         bench.same_parameters(*model);
       }},
      {"an_undefined_gradient_with_weight_decay",
       [](Bench& bench) {
         auto model = std::make_shared<Undefined>();
         Setup setup;
         setup.optimizer = torch::optim::SGDOptions(0.1).weight_decay(0.1);
         auto training = bench.wrap(model, setup);
         train(bench, *training, 0, 3);
         bench.same_parameters(*model);
       }},
      {"a_detached_loss_beside_the_real_one",
       [](Bench& bench) {
         with_loss(bench, [&](Trained& t, auto&, int64_t step) {
           const auto output = t.forward(bench.batch(step));
           bench.check(output.detach().abs().mean().item<double>() >= 0, "a metric");
           return loss_of(output);
         });
       }},
      {"an_output_used_in_place",
       [](Bench& bench) {
         with_loss(bench, [&](Trained& t, auto&, int64_t step) {
           auto output = t.forward(bench.batch(step));
           output.mul_(2).add_(1);
           return loss_of(output);
         });
       }},
  };
}

}  // namespace shoal::test
