// Gradients that a loop edits, replaces, checks or logs between backward and step: in its own loops, in several orders,
// of each micro-batch.

#include <torch/nn/utils/clip_grad.h>

#include <cmath>

#include "tests/conformance/behaviours.h"

namespace shoal::test {
namespace {

using Act = std::function<void(Bench&, Perceptron&, int64_t step)>;

// Runs `act` between backward and step.
Behaviour editing_by(const std::string& name, const Act& act) {
  return {name, [act](Bench& bench) {
            auto model = perceptron();
            auto training = bench.wrap(model);
            for (int64_t step = 0; step < 3; ++step) {
              training->zero_grad();
              loss_of(training->forward(bench.batch(step))).backward();
              bench.together([&] { act(bench, *model, step); });
              training->step();
            }
            bench.same_parameters(*model);
          }};
}

// Runs `each` after every micro-batch but the last, perhaps under no_sync, and then `end`.
Behaviour accumulating(const std::string& name, bool no_sync, const Act& each, const Act& end) {
  return {name, [=](Bench& bench) {
            auto model = perceptron();
            auto training = bench.wrap(model);
            for (int64_t step = 0; step < 3; ++step) {
              training->zero_grad();
              for (int64_t micro = 0; micro < 3; ++micro) {
                const auto local = training->no_sync(no_sync && micro < 2);
                loss_of(training->forward(bench.batch(10 * step + micro))).backward();
                bench.together([&] { (micro < 2 ? each : end)(bench, *model, step); });
              }
              training->step();
            }
            bench.same_parameters(*model);
          }};
}

void nothing(Bench&, Perceptron&, int64_t) {}

void clip_by_torch(Bench&, Perceptron& model, int64_t) {
  torch::nn::utils::clip_grad_norm_(model.parameters(), 0.05);
}

// As commonly written in forums.
double norm_of(Perceptron& model) {
  double squares = 0;
  for (const auto& parameter : model.parameters()) {
    if (parameter.grad().defined()) squares += std::pow(parameter.grad().data().norm().item<double>(), 2);
  }
  return std::sqrt(squares);
}

void scale(Perceptron& model, double by) {
  for (auto& parameter : model.parameters()) {
    if (parameter.grad().defined()) parameter.grad().mul_(by);
  }
}

Behaviours of_one_backward() {
  return {
      editing_by("clip_by_norm_in_a_loop",
                 [](Bench& bench, Perceptron& model, int64_t) {
                   const double norm = norm_of(model);
                   bench.same("norm", norm);
                   if (norm > 0.05) scale(model, 0.05 / norm);
                 }),
      editing_by("gradients_clamped_through_data",
                 [](Bench&, Perceptron& model, int64_t) {
                   for (auto& parameter : model.parameters()) parameter.grad().data().clamp_(-0.01, 0.01);
                 }),
      editing_by("gradients_scaled_then_clipped_by_value",
                 [](Bench&, Perceptron& model, int64_t) {
                   scale(model, 2);
                   torch::nn::utils::clip_grad_value_(model.parameters(), 0.01);
                 }),
      editing_by("clip_by_value_then_norm_logged_then_scaled",
                 [](Bench& bench, Perceptron& model, int64_t) {
                   torch::nn::utils::clip_grad_value_(model.parameters(), 0.01);
                   bench.same("norm", norm_of(model));
                   scale(model, 0.5);
                 }),
      editing_by("norm_logged_then_clip_by_torch",
                 [](Bench& bench, Perceptron& model, int64_t step) {
                   bench.same("norm", norm_of(model));
                   clip_by_torch(bench, model, step);
                   bench.same("norm after", norm_of(model), 1e-6);
                 }),
      editing_by("noise_added_to_gradients",
                 [](Bench&, Perceptron& model, int64_t step) {
                   const torch::NoGradGuard guard;
                   for (auto& parameter : model.parameters()) {
                     parameter.grad().add_(rows(40 + step, parameter.sizes()), 0.01);
                   }
                 }),
      editing_by("gradients_checked_for_nan",
                 [](Bench& bench, Perceptron& model, int64_t) {
                   for (const auto& parameter : model.parameters()) {
                     bench.check(!parameter.grad().isnan().any().item<bool>(), "NaN");
                   }
                 }),
      editing_by("gradients_assigned_from_themselves",
                 [](Bench&, Perceptron& model, int64_t) {
                   for (auto& parameter : model.parameters()) parameter.mutable_grad() = parameter.grad() * 0.5;
                 }),
      editing_by("a_row_of_a_gradient_zeroed",
                 [](Bench&, Perceptron& model, int64_t) { model.first->weight.grad()[1].zero_(); }),
      editing_by("one_gradient_zeroed_then_clip",
                 [](Bench& bench, Perceptron& model, int64_t step) {
                   model.second->weight.grad().zero_();
                   clip_by_torch(bench, model, step);
                 }),
      editing_by("gradients_assigned_then_clip",
                 [](Bench& bench, Perceptron& model, int64_t step) {
                   for (auto& parameter : model.parameters()) {
                     parameter.mutable_grad() = rows(50 + step, parameter.sizes());
                   }
                   clip_by_torch(bench, model, step);
                 }),
      editing_by("one_gradient_assigned",
                 [](Bench&, Perceptron& model, int64_t step) {
                   auto& weight = model.second->weight;
                   weight.mutable_grad() = rows(60 + step, weight.sizes());
                 }),
  };
}

Behaviours of_micro_batches() {
  return {
      accumulating("gradients_divided_after_accumulation", false, nothing,
                   [](Bench&, Perceptron& model, int64_t) { scale(model, 1.0 / 3); }),
      accumulating("clip_by_torch_after_accumulation", true, nothing, clip_by_torch),
      accumulating("clip_by_torch_of_each_micro_batch", false, clip_by_torch, clip_by_torch),
      accumulating("clip_by_torch_of_each_micro_batch_under_no_sync", true, clip_by_torch, clip_by_torch),
      accumulating(
          "gradients_scaled_under_no_sync", true, [](Bench&, Perceptron& model, int64_t) { scale(model, 0.5); },
          nothing),
  };
}

}  // namespace

Behaviours editing() {
  Behaviours list = of_one_backward();
  for (auto& behaviour : of_micro_batches()) list.push_back(std::move(behaviour));
  const Behaviours others{
      {"clip_by_torch_in_a_closure",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         for (int64_t step = 0; step < 3; ++step) {
           training->optimizer().step([&] {
             training->optimizer().zero_grad();
             auto loss = loss_of(training->forward(bench.batch(step)));
             loss.backward();
             bench.together([&] { clip_by_torch(bench, *model, step); });
             return loss;
           });
         }
         bench.same_parameters(*model);
       }},
      {"norms_logged_after_the_step",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         for (int64_t step = 0; step < 3; ++step) {
           loss_of(training->forward(bench.batch(step))).backward();
           training->step();
           bench.together([&] { bench.same("norm", norm_of(*model)); });
           training->zero_grad();
         }
         bench.same_parameters(*model);
       }},
      {"gradients_scaled_in_a_hook",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         for (auto& parameter : model->parameters()) {
           parameter.register_hook([](const at::Tensor& gradient) { return gradient * 0.5; });
         }
         train(bench, *training, 0, 3);
         bench.same_parameters(*model);
       }},
  };
  list.insert(list.end(), others.begin(), others.end());
  return list;
}

}  // namespace shoal::test
