// Tensors that are replaced or written while a strategy holds them.

#include <torch/nn/init.h>
#include <torch/serialize.h>

#include <sstream>

#include "tests/conformance/behaviours.h"

namespace shoal::test {
namespace {

// Output of torch::save for a module.
template <class Module>
std::string saved(const Module& module) {
  std::ostringstream stream;
  torch::save(module, stream);
  return stream.str();
}

template <class Module>
void load(Module& module, const std::string& text) {
  std::istringstream stream(text);
  torch::load(module, stream);
}

std::string other_values() {
  return saved(perceptron(2));
}

// Trains two steps, runs `act`, and trains two more.
template <class Act>
void in_the_middle(Bench& bench, const Act& act) {
  auto model = perceptron();
  auto training = bench.wrap(model);
  train(bench, *training, 0, 2);
  act(model);
  bench.same_parameters(*model);
  train(bench, *training, 2, 4);
  bench.same_parameters(*model);
}

template <class Act>
void before_the_first_step(Bench& bench, const Act& act) {
  auto model = perceptron();
  auto training = bench.wrap(model);
  act(model);
  bench.same_parameters(*model);
  train(bench, *training, 0, 3);
  bench.same_parameters(*model);
}

// Runs `act` after each backward, before the step.
template <class Act>
void before_each_update(Bench& bench, const Act& act) {
  auto model = perceptron();
  auto training = bench.wrap(model);
  for (int64_t step = 0; step < 4; ++step) {
    training->zero_grad();
    loss_of(training->forward(bench.batch(step))).backward();
    if (step > 0) act(model, step);
    training->step();
    bench.same_parameters(*model);
  }
}

void fill(at::Tensor tensor, int64_t seed) {
  const torch::NoGradGuard guard;
  tensor.copy_(rows(seed, tensor.sizes()));
}

using Model = std::shared_ptr<Perceptron>;

// Module whose forward limits its own weights with set_data.
struct Bounded : Perceptron {
  using Perceptron::forward;
  at::Tensor forward(at::Tensor x) override {
    if (is_training()) first->weight.set_data(first->weight.detach().clamp(-0.3, 0.3));
    return Perceptron::forward(std::move(x));
  }
};

struct WithBuffer : Perceptron {
  WithBuffer() { factor = register_buffer("factor", at::full({3}, 2.0, at::kDouble)); }
  using Perceptron::forward;
  at::Tensor forward(at::Tensor x) override { return Perceptron::forward(std::move(x)) * factor; }
  at::Tensor factor;
};

}  // namespace

Behaviours loading() {
  return {
      {"load_before_the_first_step",
       [](Bench& bench) { before_the_first_step(bench, [](Model& model) { load(model, other_values()); }); }},
      {"load_between_steps",
       [](Bench& bench) { in_the_middle(bench, [](Model& model) { load(model, other_values()); }); }},
      {"load_between_backward_and_step",
       [](Bench& bench) { before_each_update(bench, [](Model& model, int64_t) { load(model, other_values()); }); }},
      {"load_between_zero_grad_and_forward",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         for (int64_t step = 0; step < 3; ++step) {
           training->zero_grad();
           load(model, saved(perceptron(static_cast<int>(step) + 5)));
           loss_of(training->forward(bench.batch(step))).backward();
           training->step();
           bench.same_parameters(*model);
         }
       }},
      {"load_twice_in_a_row",
       [](Bench& bench) {
         in_the_middle(bench, [](Model& model) {
           load(model, saved(perceptron(3)));
           load(model, other_values());
         });
       }},
      {"load_of_a_sub_module",
       [](Bench& bench) {
         in_the_middle(bench, [](Model& model) { load(model->second, saved(perceptron(2)->second)); });
       }},
      {"load_through_an_archive",
       [](Bench& bench) {
         in_the_middle(bench, [](Model& model) {
           std::istringstream stream(other_values());
           torch::serialize::InputArchive archive;
           archive.load_from(stream);
           model->load(archive);
         });
       }},
      {"load_what_was_saved_in_training",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         train(bench, *training, 0, 2);
         const auto text = saved(model);
         train(bench, *training, 2, 4);
         load(model, text);
         bench.same_parameters(*model);
         train(bench, *training, 4, 6);
         bench.same_parameters(*model);
       }},
      {"load_of_rank_0_alone",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         train(bench, *training, 0, 1);
         if (bench.on(0)) load(model, other_values());
         bench.together([&] { train(bench, *training, 1, 3); });
         bench.same_parameters(*model);
       }},
      {"load_of_values_of_their_own_that_are_averaged",
       [](Bench& bench) {
         auto model = perceptron();
         Setup setup;
         setup.optimizer = torch::optim::SGDOptions(1e-30);
         auto training = bench.wrap(model, setup);
         train(bench, *training, 0, 1);
         std::vector<at::Tensor> mean;
         for (int rank = 0; rank < bench.group().size(); ++rank) {
           const auto values = perceptron(10 + rank);
           if (bench.on(rank)) load(model, saved(values));
           for (size_t i = 0; i < values->parameters().size(); ++i) {
             const auto part = values->parameters()[i].detach() / bench.group().size();
             rank == 0 ? mean.push_back(part) : static_cast<void>(mean[i] += part);
           }
         }
         train(bench, *training, 1, 4);
         const torch::NoGradGuard guard;
         auto parameters = model->parameters();
         for (size_t i = 0; bench.one_process() && i < mean.size(); ++i) parameters[i].copy_(mean[i]);
         bench.same_parameters(*model);
       }},
      {"values_of_rank_0_count_when_wrapped",
       [](Bench& bench) {
         auto model = perceptron(bench.on(0) ? 1 : 2);
         auto training = bench.wrap(model);
         bench.same_parameters(*model);
         train(bench, *training, 0, 2);
         bench.same_parameters(*model);
       }},
      {"load_replaces_buffers",
       [](Bench& bench) {
         auto model = std::make_shared<WithBuffer>();
         auto training = bench.wrap(model);
         train(bench, *training, 0, 2);
         const auto donor = std::make_shared<WithBuffer>();
         donor->factor.fill_(0.5);
         load(model, saved(donor));
         train(bench, *training, 2, 4);
         bench.same("buffer", model->factor);
         bench.same_parameters(*model);
       }},
      {"set_data_of_one_parameter_before_the_first_step",
       [](Bench& bench) {
         before_the_first_step(bench, [](Model& model) { model->second->weight.set_data(rows(3, {7, 7})); });
       }},
      {"set_data_of_one_parameter_between_steps",
       [](Bench& bench) {
         in_the_middle(bench, [](Model& model) { model->second->weight.set_data(rows(3, {7, 7})); });
       }},
      {"set_data_of_one_parameter_between_backward_and_step",
       [](Bench& bench) {
         before_each_update(bench, [](Model& model, int64_t step) { model->first->bias.set_data(rows(step, {7})); });
       }},
      {"set_data_in_forward",
       [](Bench& bench) {
         auto model = std::make_shared<Bounded>();
         auto training = bench.wrap(model);
         train(bench, *training, 0, 4);
         bench.same_parameters(*model);
       }},
      {"set_data_with_other_strides",
       [](Bench& bench) {
         in_the_middle(bench, [](Model& model) { model->second->weight.set_data(rows(3, {7, 7}).t()); });
       }},
      {"set_data_with_other_strides_before_the_first_step",
       [](Bench& bench) {
         before_the_first_step(bench, [](Model& model) { model->second->weight.set_data(rows(3, {7, 7}).t()); });
       }},
      {"data_method_assigned_in_place",
       [](Bench& bench) {
         in_the_middle(bench, [](Model& model) { model->third->weight.data().copy_(rows(4, {3, 7})); });
       }},
      {"to_float_and_back",
       [](Bench& bench) {
         in_the_middle(bench, [](Model& model) {
           model->to(at::kFloat);
           model->to(at::kDouble);
         });
       }},
      {"to_float_and_back_before_the_first_step",
       [](Bench& bench) {
         before_the_first_step(bench, [](Model& model) {
           model->to(at::kFloat);
           model->to(at::kDouble);
         });
       }},
      {"to_float_for_good",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         train(bench, *training, 0, 2);
         model->to(at::kFloat);
         for (int64_t step = 2; step < 4; ++step) {
           training->zero_grad();
           loss_of(training->forward(bench.batch(step).to(at::kFloat))).backward();
           training->step();
         }
         bench.same_parameters(*model, 1e-5);
       }},
      {"to_the_dtype_and_device_it_has",
       [](Bench& bench) { in_the_middle(bench, [](Model& model) { model->to(at::kCPU, at::kDouble); }); }},
      {"written_in_place_before_the_first_step",
       [](Bench& bench) { before_the_first_step(bench, [](Model& model) { fill(model->second->weight, 3); }); }},
      {"written_in_place_between_steps",
       [](Bench& bench) { in_the_middle(bench, [](Model& model) { fill(model->second->weight, 3); }); }},
      {"written_in_place_between_backward_and_step",
       [](Bench& bench) {
         before_each_update(bench, [](Model& model, int64_t step) { fill(model->second->weight, step); });
       }},
      {"initialised_after_wrapping",
       [](Bench& bench) {
         before_the_first_step(bench, [](Model& model) {
           torch::manual_seed(9);
           for (auto& parameter : model->parameters()) {
             if (parameter.dim() > 1) {
               torch::nn::init::xavier_uniform_(parameter);
             } else {
               torch::nn::init::zeros_(parameter);
             }
           }
         });
       }},
      {"weights_clamped_after_each_step",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         for (int64_t step = 0; step < 4; ++step) {
           train(bench, *training, step, step + 1);
           const torch::NoGradGuard guard;
           for (auto& parameter : model->parameters()) parameter.clamp_(-0.25, 0.25);
         }
         bench.same_parameters(*model);
       }},
      {"weights_scaled_in_place_after_each_step",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         for (int64_t step = 0; step < 4; ++step) {
           train(bench, *training, step, step + 1);
           const torch::NoGradGuard guard;
           for (auto& parameter : model->parameters()) parameter.mul_(0.9);
         }
         bench.same_parameters(*model);
       }},
      {"copied_from_another_module_each_step",
       [](Bench& bench) {
         auto model = perceptron();
         auto teacher = perceptron(2);
         auto training = bench.wrap(model);
         for (int64_t step = 0; step < 3; ++step) {
           {
             const torch::NoGradGuard guard;
             auto mine = model->parameters();
             const auto theirs = teacher->parameters();
             for (size_t i = 0; i < mine.size(); ++i) mine[i].lerp_(theirs[i], 0.1);
           }
           train(bench, *training, step, step + 1);
         }
         bench.same_parameters(*model);
       }},
  };
}

}  // namespace shoal::test
