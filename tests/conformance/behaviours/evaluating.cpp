// Forwards without backward, at any moment and on any rank; loops that look at parameters.

#include <c10/core/InferenceMode.h>

#include <sstream>

#include "tests/conformance/behaviours.h"

namespace shoal::test {
namespace {

// act: between forward and backward, after backward, after step.
enum class Moment { after_forward, after_backward, after_step };

template <class Act>
void looking(Bench& bench, Moment moment, const Act& act) {
  auto model = perceptron();
  auto training = bench.wrap(model);
  for (int64_t step = 0; step < 3; ++step) {
    training->zero_grad();
    const auto loss = loss_of(training->forward(bench.batch(step)));
    if (moment == Moment::after_forward) act(*training, *model);
    loss.backward();
    if (moment == Moment::after_backward) act(*training, *model);
    training->step();
    if (moment == Moment::after_step) act(*training, *model);
  }
  bench.same_parameters(*model);
}

at::Tensor test_set() {
  return rows(77, {5, 6});
}

// All ranks evaluate the same rows.
template <class Mode>
void evaluated(Bench& bench, Moment moment, bool by_wrapper) {
  looking(bench, moment, [&](Trained& training, Perceptron& model) {
    model.eval();
    at::Tensor output;
    {
      const Mode mode;
      output = by_wrapper ? training.forward(test_set()) : model.forward(test_set());
    }
    model.train();
    bench.same("outputs", output.clone());
  });
}

}  // namespace

Behaviours evaluating() {
  return {
      {"evaluation_without_gradients_between_steps",
       [](Bench& bench) { evaluated<torch::NoGradGuard>(bench, Moment::after_step, true); }},
      {"evaluation_without_gradients_between_forward_and_backward",
       [](Bench& bench) { evaluated<torch::NoGradGuard>(bench, Moment::after_forward, true); }},
      {"evaluation_without_gradients_between_backward_and_step",
       [](Bench& bench) { evaluated<torch::NoGradGuard>(bench, Moment::after_backward, true); }},
      {"evaluation_in_inference_mode_between_steps",
       [](Bench& bench) { evaluated<c10::InferenceMode>(bench, Moment::after_step, true); }},
      {"evaluation_in_inference_mode_between_forward_and_backward",
       [](Bench& bench) { evaluated<c10::InferenceMode>(bench, Moment::after_forward, true); }},
      {"evaluation_in_inference_mode_between_backward_and_step",
       [](Bench& bench) { evaluated<c10::InferenceMode>(bench, Moment::after_backward, true); }},
      {"evaluation_by_the_module_between_steps",
       [](Bench& bench) { evaluated<torch::NoGradGuard>(bench, Moment::after_step, false); }},
      {"evaluation_by_the_module_between_backward_and_step",
       [](Bench& bench) { evaluated<torch::NoGradGuard>(bench, Moment::after_backward, false); }},
      {"evaluation_in_inference_mode_by_the_module",
       [](Bench& bench) { evaluated<c10::InferenceMode>(bench, Moment::after_step, false); }},
      {"evaluation_before_the_first_step",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         {
           const torch::NoGradGuard guard;
           bench.same("outputs", training->forward(test_set()).clone());
         }
         train(bench, *training, 0, 3);
         bench.same_parameters(*model);
       }},
      {"evaluation_of_one_rank_while_others_wait",
       [](Bench& bench) {
         looking(bench, Moment::after_step, [&](Trained&, Perceptron& model) {
           const torch::NoGradGuard guard;
           if (bench.on(0)) {
             const auto output = model.forward(test_set());
             bench.check(output.isfinite().all().item<bool>(), "outputs are not finite");
           }
           bench.meet();
         });
       }},
      {"evaluation_of_one_rank_between_backward_and_step",
       [](Bench& bench) {
         looking(bench, Moment::after_backward, [&](Trained&, Perceptron& model) {
           const torch::NoGradGuard guard;
           if (bench.on(0)) model.forward(test_set());
         });
       }},
      {"evaluation_with_gradients_enabled",
       [](Bench& bench) {
         looking(bench, Moment::after_step, [&](Trained& training, Perceptron& model) {
           model.eval();
           bench.same("outputs", training.forward(test_set()));
           model.train();
         });
       }},
      {"evaluation_loss_of_ranks_added_up",
       [](Bench& bench) {
         looking(bench, Moment::after_step, [&](Trained& training, Perceptron&) {
           const torch::NoGradGuard guard;
           auto sum = training.forward(bench.batch(50)).pow(2).sum() / bench.ranks_per_part();
           if (!bench.one_process()) bench.group().all_reduce(sum).wait();
           bench.same("loss", sum);
         });
       }},
      {"parameters_cloned_between_steps",
       [](Bench& bench) {
         looking(bench, Moment::after_step, [&](auto&, Perceptron& model) {
           for (const auto& parameter : model.parameters()) bench.same("parameter", parameter.clone());
         });
       }},
      {"parameters_cloned_between_backward_and_step",
       [](Bench& bench) {
         looking(bench, Moment::after_backward, [&](auto&, Perceptron& model) {
           for (const auto& parameter : model.parameters()) bench.same("parameter", parameter.clone());
         });
       }},
      {"parameters_printed",
       [](Bench& bench) {
         looking(bench, Moment::after_step, [&](auto&, Perceptron& model) {
           std::ostringstream text;
           text << model.third->bias;
           bench.check(text.str().find("CPUDoubleType{3}") != std::string::npos, "printed: " + text.str());
         });
       }},
      {"parameters_read_by_accessor",
       [](Bench& bench) {
         looking(bench, Moment::after_step, [&](auto&, Perceptron& model) {
           const auto values = model.third->weight.detach();
           double sum = 0;
           const auto read = values.template accessor<double, 2>();
           for (int64_t i = 0; i < 3; ++i) {
             for (int64_t j = 0; j < 7; ++j) sum += read[i][j];
           }
           bench.same("sum", sum);
         });
       }},
      {"parameters_added_to_the_loss",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         for (int64_t step = 0; step < 4; ++step) {
           training->zero_grad();
           auto loss = loss_of(training->forward(bench.batch(step)));
           for (const auto& parameter : model->parameters()) loss = loss + 0.01 * parameter.pow(2).sum();
           loss.backward();
           training->step();
         }
         bench.same_parameters(*model);
       }},
      {"a_moving_average_of_the_parameters",
       [](Bench& bench) {
         auto average = perceptron();
         looking(bench, Moment::after_step, [&](auto&, Perceptron& model) {
           const torch::NoGradGuard guard;
           auto mine = average->parameters();
           const auto theirs = model.parameters();
           for (size_t i = 0; i < mine.size(); ++i) mine[i].mul_(0.9).add_(theirs[i], 0.1);
         });
         bench.same_parameters(*average);
       }},
      {"train_and_eval_on_the_module",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         for (int64_t step = 0; step < 4; ++step) {
           model->train(step % 2 == 0);
           train(bench, *training, step, step + 1);
         }
         bench.same_parameters(*model);
       }},
      {"a_sub_module_trained_by_itself",
       [](Bench& bench) {
         auto model = perceptron();
         Setup setup;
         setup.find_unused_parameters = true;
         auto training = bench.wrap(model, setup);
         train(bench, *training, 0, 2);
         training->zero_grad();
         loss_of(model->first->forward(bench.batch(2))).backward();
         training->step();
         train(bench, *training, 3, 4);
         bench.same_parameters(*model);
       }},
  };
}

}  // namespace shoal::test
