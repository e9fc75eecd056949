// Saving and loading: torch::save, state dicts, checkpoints.

#include <torch/serialize.h>

#include <sstream>

#include "shoal/checkpoint.h"
#include "tests/conformance/behaviours.h"

namespace shoal::test {
namespace {

Setup adam_at(double rate = 0.01) {
  Setup setup;
  setup.optimizer = torch::optim::AdamOptions(rate);
  return setup;
}

// In one process a checkpoint is the module and the optimizer in memory.
struct Stored {
  std::string model, optimizer;
};

Stored store(Bench& bench, const std::shared_ptr<Perceptron>& model, Trained& training, int64_t step) {
  if (!bench.one_process()) {
    save(bench.folder(), *training.state(), {.step = step});
    return {};
  }
  std::ostringstream weights, moments;
  torch::save(model, weights);
  torch::save(training.optimizer(), moments);
  return {weights.str(), moments.str()};
}

void restore(Bench& bench, const Stored& stored, std::shared_ptr<Perceptron> model, Trained& training) {
  if (!bench.one_process()) {
    load(bench.folder(), *training.state());
    return;
  }
  std::istringstream weights(stored.model), moments(stored.optimizer);
  torch::load(model, weights);
  torch::load(training.optimizer(), moments);
}

// A file that one process can read alone has the values of all ranks.
void same_as_saved(Bench& bench, const std::string& text) {
  auto copy = perceptron(9);
  std::istringstream stream(text);
  torch::load(copy, stream);
  bench.same_parameters(*copy);
}

}  // namespace

Behaviours saving() {
  return {
      {"torch_save_of_the_model_between_steps",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         train(bench, *training, 0, 2);
         std::ostringstream stream;
         torch::save(model, stream);
         same_as_saved(bench, stream.str());
         train(bench, *training, 2, 4);
         bench.same_parameters(*model);
       }},
      {"torch_save_of_the_model_between_backward_and_step",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         train(bench, *training, 0, 2);
         training->zero_grad();
         loss_of(training->forward(bench.batch(2))).backward();
         std::ostringstream stream;
         torch::save(model, stream);
         same_as_saved(bench, stream.str());
         training->step();
         bench.same_parameters(*model);
       }},
      {"torch_save_of_the_model_on_one_rank",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         train(bench, *training, 0, 2);
         std::ostringstream stream;
         bench.together([&] {
           if (bench.on(0)) torch::save(model, stream);
         });
         train(bench, *training, 2, 4);
         bench.same_parameters(*model);
       }},
      {"torch_save_of_a_list_of_parameters",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         train(bench, *training, 0, 2);
         std::stringstream stream;
         torch::save(model->parameters(), stream);
         std::vector<at::Tensor> read;
         torch::load(read, stream);
         bench.same("what was saved", read);
       }},
      {"torch_save_of_the_optimizer_and_back",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model, adam_at());
         train(bench, *training, 0, 2);
         std::stringstream stream;
         torch::save(training->optimizer(), stream);
         auto copy = perceptron();
         {
           const torch::NoGradGuard guard;
           auto mine = copy->parameters();
           const auto theirs = model->parameters();
           for (size_t i = 0; i < mine.size(); ++i) mine[i].copy_(theirs[i]);
         }
         auto again = bench.wrap(copy, adam_at());
         torch::load(again->optimizer(), stream);
         train(bench, *again, 2, 4);
         bench.same_parameters(*copy);
       }},
      {"optimizer_state_and_back",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model, adam_at());
         train(bench, *training, 0, 2);
         const auto state = training->optimizer_state();
         train(bench, *training, 2, 4);
         training->load_optimizer_state(state);
         train(bench, *training, 4, 6);
         bench.same_parameters(*model);
       }},
      {"optimizer_state_between_backward_and_step",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model, adam_at());
         train(bench, *training, 0, 2);
         training->zero_grad();
         loss_of(training->forward(bench.batch(2))).backward();
         training->load_optimizer_state(training->optimizer_state());
         training->step();
         bench.same_parameters(*model);
       }},
      {"optimizer_state_is_that_of_one_process",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model, adam_at());
         train(bench, *training, 0, 3);
         for (const auto& [name, state] : training->optimizer_state()) {
           bench.same(name + " exp_avg", state.tensors.at("exp_avg"));
           bench.same(name + " step", state.numbers.at("step"));
         }
       }},
      {"a_checkpoint_and_back",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model, adam_at());
         train(bench, *training, 0, 2);
         const auto stored = store(bench, model, *training, 2);
         train(bench, *training, 2, 4);
         restore(bench, stored, model, *training);
         bench.same_parameters(*model);
         train(bench, *training, 4, 6);
         bench.same_parameters(*model);
       }},
      {"a_checkpoint_into_a_new_training",
       [](Bench& bench) {
         Stored stored;
         {
           auto model = perceptron();
           auto training = bench.wrap(model, adam_at());
           train(bench, *training, 0, 3);
           stored = store(bench, model, *training, 3);
         }
         auto model = perceptron(2);
         auto training = bench.wrap(model, adam_at());
         restore(bench, stored, model, *training);
         train(bench, *training, 3, 5);
         bench.same_parameters(*model);
       }},
      {"a_checkpoint_has_the_rate",
       [](Bench& bench) {
         Stored stored;
         {
           auto model = perceptron();
           auto training = bench.wrap(model, adam_at(0.02));
           train(bench, *training, 0, 2);
           stored = store(bench, model, *training, 2);
         }
         auto model = perceptron(2);
         auto training = bench.wrap(model, adam_at(0.5));
         restore(bench, stored, model, *training);
         train(bench, *training, 2, 4);
         bench.same_parameters(*model);
       }},
      {"a_checkpoint_has_the_momentum",
       [](Bench& bench) {
         Stored stored;
         {
           auto model = perceptron();
           auto training = bench.wrap(model);
           train(bench, *training, 0, 2);
           stored = store(bench, model, *training, 2);
         }
         auto model = perceptron(2);
         Setup setup;
         setup.optimizer = torch::optim::SGDOptions(0.1);
         auto training = bench.wrap(model, setup);
         restore(bench, stored, model, *training);
         train(bench, *training, 2, 4);
         bench.same_parameters(*model);
       }},
      {"a_checkpoint_between_backward_and_step",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model, adam_at());
         train(bench, *training, 0, 2);
         training->zero_grad();
         loss_of(training->forward(bench.batch(2))).backward();
         store(bench, model, *training, 2);
         training->step();
         bench.same_parameters(*model);
       }},
  };
}

}  // namespace shoal::test
