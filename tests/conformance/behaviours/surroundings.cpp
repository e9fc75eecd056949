// Surroundings of a loop: threads, modules that change, optimizers beside the strategy's.

#include <torch/nn/utils/convert_parameters.h>

#include <exception>
#include <thread>

#include "tests/conformance/behaviours.h"

namespace shoal::test {
namespace {

// Runs `act` on a separate thread, and rethrows its exception here.
template <class Act>
void on_a_thread(const Act& act) {
  std::exception_ptr error;
  std::thread([&] {
    try {
      act();
    } catch (const std::exception&) {
      error = std::current_exception();
    }
  }).join();
  if (error) std::rethrow_exception(error);
}

// Runs the three parts of a step, each with its runner.
template <class Forward, class Backward, class Step>
void by_parts(Bench& bench, const Forward& forward, const Backward& backward, const Step& step) {
  auto model = perceptron();
  auto training = bench.wrap(model);
  for (int64_t number = 0; number < 4; ++number) {
    training->zero_grad();
    at::Tensor loss;
    forward([&] { loss = loss_of(training->forward(bench.batch(number))); });
    backward([&] { loss.backward(); });
    step([&] { training->step(); });
  }
  bench.same_parameters(*model);
}

const auto here = [](const auto& act) { act(); };
const auto elsewhere = [](const auto& act) { on_a_thread(act); };

// Module with submodules by name, so that they can be replaced.
struct Replaceable : Perceptron {
  using Perceptron::forward;
  void replace_third() {
    torch::manual_seed(12);
    torch::nn::Linear layer(7, 3);
    layer->to(at::kDouble);
    third = replace_module("third", layer);
  }
  void add_scale() { scale = register_parameter("scale", torch::full({3}, 0.5, at::kDouble)); }
  at::Tensor forward(at::Tensor x) override {
    auto out = Perceptron::forward(std::move(x));
    return scale.defined() ? out * scale : out;
  }
  at::Tensor scale;
};

// Trains `steps` steps, changes the module, and trains two more.
template <class Change>
void changed_after(Bench& bench, int64_t steps, const Change& change) {
  auto model = std::make_shared<Replaceable>();
  Setup setup;
  setup.find_unused_parameters = true;
  auto training = bench.wrap(model, setup);
  train(bench, *training, 0, steps);
  change(*model, *training);
  train(bench, *training, steps, steps + 2);
  bench.same_parameters(*model);
}

}  // namespace

Behaviours surroundings() {
  return {
      {"a_loop_on_another_thread",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         on_a_thread([&] { train(bench, *training, 0, 4); });
         bench.same_parameters(*model);
       }},
      {"a_loop_on_a_new_thread_each_step",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         for (int64_t step = 0; step < 4; ++step) on_a_thread([&] { train(bench, *training, step, step + 1); });
         bench.same_parameters(*model);
       }},
      {"a_wrapper_made_on_another_thread",
       [](Bench& bench) {
         auto model = perceptron();
         std::unique_ptr<Trained> training;
         on_a_thread([&] { training = bench.wrap(model); });
         train(bench, *training, 0, 3);
         bench.same_parameters(*model);
         on_a_thread([&] { training.reset(); });
       }},
      {"a_forward_on_another_thread", [](Bench& bench) { by_parts(bench, elsewhere, here, here); }},
      {"a_backward_on_another_thread", [](Bench& bench) { by_parts(bench, here, elsewhere, here); }},
      {"a_step_on_another_thread", [](Bench& bench) { by_parts(bench, here, here, elsewhere); }},
      {"each_part_on_a_thread_of_its_own", [](Bench& bench) { by_parts(bench, elsewhere, elsewhere, elsewhere); }},
      {"parameters_read_on_another_thread",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         for (int64_t step = 0; step < 3; ++step) {
           train(bench, *training, step, step + 1);
           on_a_thread([&] { bench.same_parameters(*model); });
         }
       }},
      {"evaluation_on_another_thread",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         for (int64_t step = 0; step < 3; ++step) {
           train(bench, *training, step, step + 1);
           on_a_thread([&] {
             const torch::NoGradGuard guard;
             bench.same("outputs", training->forward(rows(50, {4, 6})));
           });
         }
         bench.same_parameters(*model);
       }},
      {"parameters_to_vector_of_torch",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         for (int64_t step = 0; step < 3; ++step) {
           train(bench, *training, step, step + 1);
           bench.same("all parameters", torch::nn::utils::parameters_to_vector(model->parameters()));
         }
       }},
      {"vector_to_parameters_of_torch",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         train(bench, *training, 0, 2);
         const auto vector = rows(3, {7 * 7 + 7 * 8 + 3 * 8});
         torch::nn::utils::vector_to_parameters(vector, model->parameters());
         bench.same_parameters(*model);
         train(bench, *training, 2, 4);
         bench.same_parameters(*model);
       }},
      {"an_update_by_hand",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         for (int64_t step = 0; step < 3; ++step) {
           model->zero_grad();
           loss_of(training->forward(bench.batch(step))).backward();
           const torch::NoGradGuard guard;
           for (auto& parameter : model->parameters()) parameter.sub_(parameter.grad(), 0.1);
         }
         bench.same_parameters(*model);
       }},
      {"an_optimizer_of_torch_in_place_of_the_strategys",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(1e-2));
         for (int64_t step = 0; step < 3; ++step) {
           optimizer.zero_grad();
           loss_of(training->forward(bench.batch(step))).backward();
           optimizer.step();
         }
         bench.same_parameters(*model);
       }},
      {"a_module_replaced_before_the_first_step",
       [](Bench& bench) { changed_after(bench, 0, [](auto& model, auto&) { model.replace_third(); }); }},
      {"a_module_replaced_between_steps",
       [](Bench& bench) { changed_after(bench, 2, [](auto& model, auto&) { model.replace_third(); }); }},
      {"a_module_replaced_and_given_to_the_optimizer",
       [](Bench& bench) {
         changed_after(bench, 2, [](auto& model, auto& training) {
           model.replace_third();
           training.optimizer().add_param_group(torch::optim::OptimizerParamGroup(model.third->parameters()));
         });
       }},
      {"a_parameter_registered_between_steps",
       [](Bench& bench) {
         changed_after(bench, 2, [](auto& model, auto& training) {
           model.add_scale();
           training.optimizer().add_param_group(torch::optim::OptimizerParamGroup({model.scale}));
         });
       }},
      {"an_optimizer_of_torch_for_a_part_that_was_replaced",
       [](Bench& bench) {
         auto model = std::make_shared<Replaceable>();
         Setup setup;
         setup.find_unused_parameters = true;
         auto training = bench.wrap(model, setup);
         train(bench, *training, 0, 2);
         model->replace_third();
         torch::optim::SGD optimizer(model->third->parameters(), torch::optim::SGDOptions(0.1));
         for (int64_t step = 2; step < 5; ++step) {
           training->zero_grad();
           optimizer.zero_grad();
           loss_of(training->forward(bench.batch(step))).backward();
           training->step();
           optimizer.step();
         }
         bench.same_parameters(*model);
       }},
  };
}

}  // namespace shoal::test
