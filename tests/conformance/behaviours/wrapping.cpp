// Construction and destruction of modules, wrappers and optimizers; kinds of modules, inputs and outputs.

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/dropout.h>
#include <torch/serialize.h>

#include <sstream>

#include "tests/conformance/behaviours.h"

namespace shoal::test {
namespace {

struct TwoOutputs : Perceptron {
  using Perceptron::forward;
  TensorPair forward(at::Tensor x, at::Tensor y) override { return {Perceptron::forward(x), Perceptron::forward(y)}; }
  Tensors forward(Tensors list) override {
    for (auto& x : list) x = Perceptron::forward(x);
    return list;
  }
  NamedTensors forward(NamedTensors named) override {
    for (auto& [name, x] : named) x = Perceptron::forward(x);
    return named;
  }
  Heads forward(at::Tensor x, int times) override {
    const auto hidden = torch::tanh(first(x));
    return {third(hidden) * times, third(torch::tanh(second(hidden)))};
  }
  void forward(at::Tensor x, Tensors& into) override { into.push_back(Perceptron::forward(x)); }
};

template <class Loss>
void returning(Bench& bench, const Loss& loss) {
  auto model = std::make_shared<TwoOutputs>();
  auto training = bench.wrap(model);
  for (int64_t step = 0; step < 3; ++step) {
    training->zero_grad();
    at::Tensor value = loss(*training, bench.batch(step), bench.batch(step + 10));
    value.backward();
    training->step();
  }
  bench.same_parameters(*model);
}

struct Outer : Network {
  Outer() {
    inner = register_module("inner", perceptron());
    out = register_module("out", torch::nn::Linear(3, 2));
    to(at::kDouble);
  }
  using Network::forward;
  at::Tensor forward(at::Tensor x) override { return out(inner->forward(std::move(x))); }
  std::shared_ptr<Perceptron> inner;
  torch::nn::Linear out{nullptr};
};

void made_again(Bench& bench, bool unwrap) {
  auto model = perceptron();
  Setup setup;
  setup.optimizer = torch::optim::SGDOptions(0.1);
  for (int64_t step = 0; step < 3; ++step) {
    auto training = bench.wrap(model, setup);
    train(bench, *training, step, step + 1);
    if (unwrap) training->unwrap();
  }
  auto training = bench.wrap(model, setup);
  bench.same_parameters(*model);
}

torch::nn::Sequential sequential() {
  torch::manual_seed(3);
  torch::nn::Sequential model(torch::nn::Linear(6, 7), torch::nn::Tanh(), torch::nn::Linear(7, 3));
  model->to(at::kDouble);
  return model;
}

void two_models(Bench& bench, bool interleaved) {
  auto a = perceptron(1), b = perceptron(2);
  auto first = bench.wrap(a), second = bench.wrap(b);
  for (int64_t step = 0; step < 3; ++step) {
    if (interleaved) {
      first->zero_grad();
      second->zero_grad();
      const auto x = bench.batch(step);
      (loss_of(first->forward(x)) + loss_of(second->forward(x))).backward();
      first->step();
      second->step();
    } else {
      train(bench, *first, step, step + 1);
      train(bench, *second, step, step + 1);
    }
  }
  bench.same_parameters(*a);
  bench.same_parameters(*b);
}

ParamGroups two_groups(Perceptron& model) {
  ParamGroups groups;
  groups.emplace_back(std::vector<at::Tensor>{model.first->weight, model.second->weight, model.third->weight},
                      std::make_unique<torch::optim::SGDOptions>(torch::optim::SGDOptions(0.1).weight_decay(0.1)));
  groups.emplace_back(std::vector<at::Tensor>{model.first->bias, model.second->bias, model.third->bias},
                      std::make_unique<torch::optim::SGDOptions>(torch::optim::SGDOptions(0.05).momentum(0.5)));
  return groups;
}

}  // namespace

Behaviours wrapping() {
  return {
      {"an_optimizer_made_before_the_wrapper",
       [](Bench& bench) {
         auto model = perceptron();
         Setup setup;
         setup.optimizer_first = true;
         auto training = bench.wrap(model, setup);
         train(bench, *training, 0, 3);
         bench.same_parameters(*model);
       }},
      {"a_wrapper_made_again", [](Bench& bench) { made_again(bench, /*unwrap=*/false); }},
      {"a_wrapper_made_again_after_unwrap", [](Bench& bench) { made_again(bench, /*unwrap=*/true); }},
      {"a_model_used_after_unwrap",
       [](Bench& bench) {
         auto model = perceptron();
         std::stringstream stream;
         {
           auto training = bench.wrap(model);
           train(bench, *training, 0, 3);
           training->unwrap();
           bench.same("outputs before the wrapper has gone", model->forward(rows(3, {4, 6})));
           torch::save(model, stream);
         }
         bench.same("outputs", model->forward(rows(3, {4, 6})));
         torch::load(model, stream);
         model->zero_grad();
         loss_of(model->forward(rows(4, {4, 6}))).backward();
         bench.same("gradient", model->parameters().front().grad());
       }},
      {"a_model_read_when_the_wrapper_has_gone",
       [](Bench& bench) {
         auto model = perceptron();
         {
           auto training = bench.wrap(model);
           train(bench, *training, 0, 3);
         }
         bench.same_parameters(*model);
         bench.same("outputs", model->forward(rows(3, {4, 6})));
       }},
      {"a_wrapper_destroyed_between_backward_and_step",
       [](Bench& bench) {
         auto model = perceptron();
         Setup setup;
         setup.optimizer = torch::optim::SGDOptions(0.1);
         {
           auto training = bench.wrap(model, setup);
           train(bench, *training, 0, 1);
           loss_of(training->forward(bench.batch(1))).backward();
         }
         for (auto& parameter : model->parameters()) parameter.mutable_grad() = at::Tensor();
         auto training = bench.wrap(model, setup);
         train(bench, *training, 2, 3);
         bench.same_parameters(*model);
       }},
      {"a_model_trained_before_it_is_wrapped",
       [](Bench& bench) {
         auto model = perceptron();
         torch::optim::SGD alone(model->parameters(), 0.1);
         for (int64_t step = 0; step < 2; ++step) {
           alone.zero_grad();
           loss_of(model->forward(rows(step, {12, 6}))).backward();
           alone.step();
         }
         auto training = bench.wrap(model);  // gradients are still there
         train(bench, *training, 2, 4);
         bench.same_parameters(*model);
       }},
      {"a_gradient_from_before_it_was_wrapped_counts",
       [](Bench& bench) {
         auto model = perceptron();
         loss_of(model->forward(rows(1, {12, 6}))).backward();
         auto training = bench.wrap(model);
         loss_of(training->forward(bench.batch(2))).backward();
         training->step();
         bench.same_parameters(*model);
       }},
      {"two_models_by_turns", [](Bench& bench) { two_models(bench, false); }},
      {"two_models_in_one_loss", [](Bench& bench) { two_models(bench, true); }},
      {"a_wrapped_module_inside_another",
       [](Bench& bench) {
         auto outer = std::make_shared<Outer>();
         auto training = bench.wrap(outer);
         train(bench, *training, 0, 3);
         bench.same_parameters(*outer);
       }},
      {"a_sequential",
       [](Bench& bench) {
         auto model = sequential();
         auto training = bench.wrap(model);
         train(bench, *training, 0, 3);
         bench.same_parameters(*model);
       }},
      {"a_sub_module_is_cloned",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         train(bench, *training, 0, 2);
         const auto copy = std::dynamic_pointer_cast<torch::nn::LinearImpl>(model->second->clone());
         train(bench, *training, 2, 4);
         bench.same("the clone", copy->weight);
         bench.same_parameters(*model);
       }},
      {"a_sequential_is_cloned_and_trained_alone",
       [](Bench& bench) {
         auto model = sequential();
         auto training = bench.wrap(model);
         train(bench, *training, 0, 2);
         const auto copy = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(model->clone());
         torch::optim::SGD alone(copy->parameters(), 0.1);
         loss_of(copy->forward(rows(5, {12, 6}))).backward();
         alone.step();
         train(bench, *training, 2, 3);
         bench.same_parameters(*copy);
         bench.same_parameters(*model);
       }},
      {"a_module_that_takes_and_returns_two_tensors",
       [](Bench& bench) {
         returning(bench, [](Trained& t, const at::Tensor& x, const at::Tensor& y) {
           const auto [a, b] = t.forward(x, y);
           return loss_of(a) + loss_of(b);
         });
       }},
      {"a_module_that_returns_a_vector",
       [](Bench& bench) {
         returning(bench, [](Trained& t, const at::Tensor& x, const at::Tensor& y) {
           const auto list = t.forward(Tensors{x, y});
           return loss_of(list[0]) + loss_of(list[1]);
         });
       }},
      {"a_module_that_returns_a_map",
       [](Bench& bench) {
         returning(bench, [](Trained& t, const at::Tensor& x, const at::Tensor& y) {
           auto named = t.forward(NamedTensors{{"x", x}, {"y", y}});
           return loss_of(named["x"]) + loss_of(named["y"]);
         });
       }},
      {"a_module_that_returns_a_type_of_its_own",
       [](Bench& bench) {
         returning(bench, [](Trained& t, const at::Tensor& x, const at::Tensor&) {
           const auto heads = t.forward(x, 2);
           return loss_of(heads.value) + loss_of(heads.policy);
         });
       }},
      {"a_module_that_returns_nothing",
       [](Bench& bench) {
         returning(bench, [](Trained& t, const at::Tensor& x, const at::Tensor&) {
           Tensors outputs;
           t.forward(x, outputs);
           return loss_of(outputs.at(0));
         });
       }},
      {"an_output_that_the_loss_does_not_use",
       [](Bench& bench) {
         returning(bench, [](Trained& t, const at::Tensor& x, const at::Tensor& y) {
           return loss_of(std::get<0>(t.forward(x, y)));
         });
       }},
      {"param_groups_with_options_of_their_own",
       [](Bench& bench) {
         auto model = perceptron();
         Setup setup;
         setup.groups = [&] { return two_groups(*model); };
         auto training = bench.wrap(model, setup);
         train(bench, *training, 0, 4);
         bench.same_parameters(*model);
       }},
      {"a_param_group_added_through_the_base_class",
       [](Bench& bench) {
         auto model = perceptron();
         Setup setup;
         setup.groups = [&] {
           auto groups = two_groups(*model);
           groups.pop_back();
           return groups;
         };
         auto training = bench.wrap(model, setup);
         train(bench, *training, 0, 2);
         training->optimizer().add_param_group(two_groups(*model)[1]);
         train(bench, *training, 2, 4);
         bench.same_parameters(*model);
       }},
      {"a_param_group_that_is_there_already",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         train(bench, *training, 0, 1);
         bool refused = false;
         try {
           training->optimizer().add_param_group(torch::optim::OptimizerParamGroup({model->first->weight}));
         } catch (const std::exception&) {
           refused = true;
         }
         bench.check(refused, "a parameter is in two groups");
         train(bench, *training, 1, 3);
         bench.same_parameters(*model);
       }},
      {"ignored_parameters",
       [](Bench& bench) {
         auto model = perceptron();
         if (bench.one_process()) model->first->weight.requires_grad_(false);
         Setup setup;
         setup.ignored = {"first.weight"};
         if (!bench.one_process()) {
           setup.groups = [&] {
             auto parameters = model->parameters();
             parameters.erase(parameters.begin());
             ParamGroups groups;
             groups.emplace_back(parameters);
             return groups;
           };
         }
         auto training = bench.wrap(model, setup);
         train(bench, *training, 0, 3);
         bench.same_parameters(*model);
       }},
      {"random_numbers_are_the_callers",
       [](Bench& bench) {
         auto model = perceptron();
         torch::manual_seed(17);
         auto training = bench.wrap(model);
         bench.same("first random numbers", at::rand({4}));
         train(bench, *training, 0, 2);
         bench.same("later random numbers", at::rand({4}));
       }},
  };
}

}  // namespace shoal::test
