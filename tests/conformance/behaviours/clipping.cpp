// Clipping, and gradients that a loop reads or writes itself.

#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/utils/clip_grad.h>

#include <cmath>
#include <sstream>

#include "shoal/error.h"
#include "tests/conformance/behaviours.h"

namespace shoal::test {
namespace {

// Runs `act` between backward and step, and observes its result.
template <class Act>
void with_gradients(Bench& bench, const Act& act, const Setup& setup = {}) {
  auto model = perceptron();
  auto training = bench.wrap(model, setup);
  for (int64_t step = 0; step < 3; ++step) {
    training->zero_grad();
    loss_of(training->forward(bench.batch(step))).backward();
    bench.together([&] { act(*training, *model); });
    training->step();
  }
  bench.same_parameters(*model);
}

}  // namespace

Behaviours clipping() {
  return {
      {"clip_by_the_strategy",
       [](Bench& bench) {
         with_gradients(bench, [&](Trained& training, auto&) { bench.same("norm", training.clip(0.05)); });
       }},
      {"clip_as_asked_at_the_start",
       [](Bench& bench) {
         Setup setup;
         setup.clip = 0.05;
         with_gradients(
             bench, [](Trained&, auto&) {}, setup);
       }},
      {"clip_grad_norm_of_torch",
       [](Bench& bench) {
         with_gradients(bench, [&](Trained&, auto& model) {
           bench.same("norm", torch::nn::utils::clip_grad_norm_(model.parameters(), 0.05), 1e-6);
         });
       }},
      {"clip_grad_norm_of_torch_by_the_largest",
       [](Bench& bench) {
         with_gradients(bench, [&](Trained&, auto& model) {
           bench.same("norm", torch::nn::utils::clip_grad_norm_(model.parameters(), 0.01, INFINITY), 1e-6);
         });
       }},
      {"clip_grad_norm_of_torch_of_a_part",
       [](Bench& bench) {
         with_gradients(bench, [&](Trained&, auto& model) {
           bench.same("norm", torch::nn::utils::clip_grad_norm_(model.second->parameters(), 0.01), 1e-6);
         });
       }},
      {"clip_grad_value_of_torch",
       [](Bench& bench) {
         with_gradients(bench,
                        [](Trained&, auto& model) { torch::nn::utils::clip_grad_value_(model.parameters(), 0.01); });
       }},
      {"clip_twice",
       [](Bench& bench) {
         with_gradients(bench, [&](Trained& training, auto&) {
           training.clip(0.05);
           bench.same("norm", training.clip(0.02));
         });
       }},
      {"clip_then_zero_grad",
       [](Bench& bench) {
         with_gradients(bench, [&](Trained& training, auto&) {
           training.clip(0.05);
           training.zero_grad();
         });
       }},
      {"clip_after_accumulation",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         for (int64_t step = 0; step < 3; ++step) {
           training->zero_grad();
           for (int64_t micro = 0; micro < 3; ++micro) {
             const auto local = training->no_sync(micro < 2);
             loss_of(training->forward(bench.batch(10 * step + micro))).backward();
           }
           bench.same("norm", training->clip(0.05));
           training->step();
         }
         bench.same_parameters(*model);
       }},
      {"clip_refused_then_by_the_option",
       [](Bench& bench) {
         Setup setup;
         setup.clip = 0.05;
         with_gradients(
             bench,
             [](Trained&, auto& model) {
               try {
                 torch::nn::utils::clip_grad_norm_(model.parameters(), 1e9);
               } catch (const UsageError&) {  // a refused call changes nothing
               }
             },
             setup);
       }},
      {"norms_of_gradients_logged",
       [](Bench& bench) {
         with_gradients(bench, [&](Trained&, auto& model) {
           for (const auto& parameter : model.parameters()) bench.same("norm", parameter.grad().norm());
         });
       }},
      {"gradients_cloned",
       [](Bench& bench) {
         with_gradients(bench, [&](Trained&, auto& model) {
           for (const auto& parameter : model.parameters()) bench.same("gradient", parameter.grad().clone());
         });
       }},
      {"gradients_printed",
       [](Bench& bench) {
         with_gradients(bench, [&](Trained&, auto& model) {
           for (const auto& parameter : model.parameters()) {
             std::ostringstream text;
             text << parameter.grad();
             bench.check(text.str().find("CPUDoubleType{") != std::string::npos, "printed: " + text.str());
           }
         });
       }},
      {"gradients_scaled_by_hand",
       [](Bench& bench) {
         with_gradients(bench, [](Trained&, auto& model) {
           for (auto& parameter : model.parameters()) parameter.grad().mul_(0.5);
         });
       }},
      {"gradients_replaced_by_hand",
       [](Bench& bench) {
         with_gradients(bench, [](Trained&, auto& model) {
           for (auto& parameter : model.parameters()) parameter.mutable_grad() = at::ones_like(parameter);
         });
       }},
      {"weight_decay_added_by_hand",
       [](Bench& bench) {
         with_gradients(bench, [](Trained&, auto& model) {
           const torch::NoGradGuard guard;
           for (auto& parameter : model.parameters()) parameter.grad().add_(parameter, 0.01);
         });
       }},
      {"gradients_given_without_a_backward",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         for (int64_t step = 0; step < 2; ++step) {
           for (auto& parameter : model->parameters()) parameter.mutable_grad() = at::ones_like(parameter);
           training->step();
           training->zero_grad();
         }
         train(bench, *training, 0, 2);
         bench.same_parameters(*model);
       }},
      {"gradients_from_autograd_grad_given_by_hand",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         for (int64_t step = 0; step < 2; ++step) {
           auto parameters = model->parameters();
           const auto loss = loss_of(training->forward(rows(step, {12, 6})));  // the whole batch on every rank
           const auto gradients = torch::autograd::grad({loss}, parameters);
           for (size_t i = 0; i < parameters.size(); ++i) parameters[i].mutable_grad() = gradients[i];
           training->step();
         }
         bench.same_parameters(*model);
       }},
      {"gradients_read_after_step",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         train(bench, *training, 0, 2);
         for (const auto& parameter : model->parameters()) bench.same("gradient", parameter.grad());
         train(bench, *training, 2, 3);
         bench.same_parameters(*model);
       }},
  };
}

}  // namespace shoal::test
