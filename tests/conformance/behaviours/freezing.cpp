// Parameters that are frozen, trained at times, have two names, or are used by some steps only.

#include <torch/nn/modules/embedding.h>

#include "tests/conformance/behaviours.h"

namespace shoal::test {
namespace {

// Another name for a weight.
struct Head : torch::nn::Module {
  explicit Head(const at::Tensor& of) { weight = register_parameter("weight", of); }
  at::Tensor weight;
};

struct Tied : Network {
  Tied() {
    torch::manual_seed(5);
    inside = register_module("inside", torch::nn::Linear(torch::nn::LinearOptions(6, 6).bias(false)));
    to(at::kDouble);
    outside = register_module("outside", std::make_shared<Head>(inside->weight));
  }
  using Network::forward;
  at::Tensor forward(at::Tensor x) override { return at::linear(torch::tanh(inside(x)), outside->weight); }
  torch::nn::Linear inside{nullptr};
  std::shared_ptr<Head> outside;
};

struct Branches : Network {
  Branches() {
    torch::manual_seed(6);
    left = register_module("left", torch::nn::Linear(6, 3));
    right = register_module("right", torch::nn::Linear(6, 3));
    to(at::kDouble);
  }
  using Network::forward;
  at::Tensor forward(at::Tensor x) override {
    if (use == 0) return left(x);
    return use == 1 ? right(x) : left(x) + right(x);
  }
  torch::nn::Linear left{nullptr}, right{nullptr};
  int use = 2;
};

struct Words : Network {
  explicit Words(bool sparse) {
    torch::manual_seed(7);
    table = register_module("table", torch::nn::Embedding(torch::nn::EmbeddingOptions(11, 4).sparse(sparse)));
    out = register_module("out", torch::nn::Linear(4, 3));
    to(at::kDouble);
  }
  using Network::forward;
  at::Tensor forward(at::Tensor words) override { return out(torch::tanh(table(words))); }
  torch::nn::Embedding table{nullptr};
  torch::nn::Linear out{nullptr};
};

// The embedding's weight is the decoder's, too, whose gradient is dense.
struct TiedWords : Network {
  TiedWords() {
    torch::manual_seed(7);
    table = register_module("table", torch::nn::Embedding(torch::nn::EmbeddingOptions(11, 4).sparse(true)));
    middle = register_module("middle", torch::nn::Linear(4, 4));
    to(at::kDouble);
  }
  using Network::forward;
  at::Tensor forward(at::Tensor words) override {
    const auto x = torch::tanh(middle(table(words)));
    return tied ? at::linear(x, table->weight) : x;
  }
  torch::nn::Embedding table{nullptr};
  torch::nn::Linear middle{nullptr};
  bool tied = true;
};

void of_tied_words(Bench& bench) {
  auto model = std::make_shared<TiedWords>();
  auto training = bench.wrap(model, {});
  for (int64_t step = 0; step < 5; ++step) {
    model->tied = step % 3 != 1;
    training->zero_grad();
    const auto words = rows(step, {12, 2}).abs().mul(5).to(at::kLong).clamp(0, 10);
    loss_of(training->forward(bench.share(words))).backward();
    training->step();
  }
  bench.same_parameters(*model);
}

void of_words(Bench& bench, bool sparse, double momentum) {
  auto model = std::make_shared<Words>(sparse);
  Setup setup;
  setup.optimizer = torch::optim::SGDOptions(0.1).momentum(momentum);
  auto training = bench.wrap(model, setup);
  for (int64_t step = 0; step < 4; ++step) {
    training->zero_grad();
    const auto words = rows(step, {12, 2}).abs().mul(5).to(at::kLong).clamp(0, 10);
    loss_of(training->forward(bench.share(words))).backward();
    training->step();
  }
  bench.same_parameters(*model);
}

void with_branches(Bench& bench, const Setup& setup, const std::function<int(int64_t)>& use) {
  auto model = std::make_shared<Branches>();
  auto training = bench.wrap(model, setup);
  for (int64_t step = 0; step < 5; ++step) {
    model->use = use(step);
    train(bench, *training, step, step + 1);
  }
  bench.same_parameters(*model);
}

Setup finding() {
  Setup setup;
  setup.find_unused_parameters = true;
  return setup;
}

}  // namespace

Behaviours freezing() {
  return {
      {"frozen_before_wrapping",
       [](Bench& bench) {
         auto model = perceptron();
         set_trainable(*model->first, false);
         auto training = bench.wrap(model);
         train(bench, *training, 0, 3);
         bench.same_parameters(*model);
       }},
      {"frozen_after_wrapping",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         set_trainable(*model->first, false);
         train(bench, *training, 0, 3);
         bench.same_parameters(*model);
       }},
      {"frozen_between_steps",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         train(bench, *training, 0, 2);
         set_trainable(*model->second, false);
         train(bench, *training, 2, 4);
         bench.same_parameters(*model);
       }},
      {"thawed_between_steps",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         train(bench, *training, 0, 1);
         set_trainable(*model->second, false);
         train(bench, *training, 1, 3);
         set_trainable(*model->second, true);
         train(bench, *training, 3, 5);
         bench.same_parameters(*model);
       }},
      {"frozen_every_second_step",
       [](Bench& bench) {
         auto model = perceptron();
         Setup setup;
         setup.optimizer = torch::optim::AdamOptions(0.01);
         auto training = bench.wrap(model, setup);
         for (int64_t step = 0; step < 6; ++step) {
           set_trainable(*model->second, step % 2 == 0);
           train(bench, *training, step, step + 1);
         }
         bench.same_parameters(*model);
       }},
      {"frozen_between_forward_and_backward",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         for (int64_t step = 0; step < 3; ++step) {
           training->zero_grad();
           const auto loss = loss_of(training->forward(bench.batch(step)));
           set_trainable(*model->first, step != 1);
           loss.backward();
           training->step();
           set_trainable(*model->first, true);
         }
         bench.same_parameters(*model);
       }},
      {"frozen_for_the_whole_step_then_not",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         train(bench, *training, 0, 1);
         set_trainable(*model, false);
         training->zero_grad();
         training->forward(bench.batch(1));
         set_trainable(*model, true);
         train(bench, *training, 2, 4);
         bench.same_parameters(*model);
       }},
      {"inputs_that_require_gradients",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         for (int64_t step = 0; step < 3; ++step) {
           training->zero_grad();
           auto x = rows(step, {12, 6});  // the whole batch on every rank
           x.requires_grad_();
           loss_of(training->forward(x)).backward();
           training->step();
           bench.same("gradient of the input", x.grad());
         }
         bench.same_parameters(*model);
       }},
      {"tied_weights",
       [](Bench& bench) {
         auto model = std::make_shared<Tied>();
         auto training = bench.wrap(model);
         train(bench, *training, 0, 4);
         bench.same_parameters(*model);
         bench.check(model->inside->weight.is_same(model->outside->weight), "the weight is tied no more");
       }},
      {"tied_weights_loaded",
       [](Bench& bench) {
         auto model = std::make_shared<Tied>();
         auto training = bench.wrap(model);
         train(bench, *training, 0, 2);
         model->inside->weight.set_data(rows(5, {6, 6}));
         train(bench, *training, 2, 4);
         bench.same_parameters(*model);
       }},
      {"a_parameter_that_no_rank_uses",
       [](Bench& bench) { with_branches(bench, finding(), [](int64_t) { return 0; }); }},
      {"a_parameter_that_some_steps_do_not_use",
       [](Bench& bench) { with_branches(bench, finding(), [](int64_t step) { return static_cast<int>(step % 3); }); }},
      {"a_parameter_that_no_rank_uses_without_the_option",
       [](Bench& bench) { with_branches(bench, {}, [](int64_t) { return 0; }); }},
      {"a_parameter_that_one_rank_does_not_use",
       [](Bench& bench) {
         auto model = std::make_shared<Branches>();
         auto training = bench.wrap(model, finding());
         for (int64_t step = 0; step < 4; ++step) {
           training->zero_grad();
           // The first rank uses one branch, the others use the other.
           at::Tensor sum = at::zeros({}, at::kDouble);
           for (int number = 0; number < bench.parts(); ++number) {
             if (!bench.one_process() && number != bench.part().number) continue;
             model->use = number == 0 ? 0 : 1;
             const auto loss = loss_of(training->forward(bench.share_of(rows(step, {12, 6}), number)));
             sum = sum + loss / (bench.one_process() ? bench.parts() : 1);
           }
           sum.backward();
           training->step();
         }
         bench.same_parameters(*model);
       }},
      {"an_embedding", [](Bench& bench) { of_words(bench, false, 0.9); }},
      {"a_sparse_embedding", [](Bench& bench) { of_words(bench, true, 0); }},
      {"a_tied_sparse_embedding", of_tied_words},
  };
}

}  // namespace shoal::test
