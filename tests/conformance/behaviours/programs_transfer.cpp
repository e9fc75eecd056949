// Whole programs: a scripted backbone under a new head.

#include <torch/csrc/jit/serialization/import.h>
#include <torch/script.h>

#include <sstream>

#include "tests/conformance/behaviours.h"

namespace shoal::test {
namespace {

// Module as loaded from a file that Python has written.
torch::jit::Module backbone() {
  torch::jit::Module made("backbone");
  made.register_parameter("weight", rows(61, {7, 6}) * 0.3, false);
  made.register_parameter("bias", rows(62, {7}) * 0.1, false);
  made.define("def forward(self, x):\n    return torch.tanh(x.matmul(self.weight.t()) + self.bias)\n");
  std::stringstream file;
  made.save(file);
  return torch::jit::load(file);
}

at::Tensor features(torch::jit::Module& module, const at::Tensor& x) {
  return module.forward({x}).toTensor();
}

// The backbone's parameters are registered, so that a wrapper and an optimizer find them.
struct Classifier : Network {
  explicit Classifier(bool trainable) : scripted(backbone()) {
    torch::manual_seed(63);
    for (const auto& entry : scripted.named_parameters()) {
      register_parameter("backbone_" + entry.name, entry.value.set_requires_grad(trainable), trainable);
    }
    hidden = register_module("hidden", torch::nn::Linear(7, 5));
    head = register_module("head", torch::nn::Linear(5, 3));
    to(at::kDouble);
  }
  using Network::forward;
  at::Tensor forward(at::Tensor x) override { return head(torch::tanh(hidden(features(scripted, x)))); }

  torch::jit::Module scripted;
  torch::nn::Linear hidden{nullptr}, head{nullptr};
};

at::Tensor classified(const at::Tensor& logits, int64_t step, const Bench& bench) {
  const auto classes = bench.share(rows(step + 70, {12}).abs().mul(2).to(at::kLong).clamp(0, 2));
  return at::cross_entropy_loss(logits, classes);
}

void epochs(Bench& bench, Trained& training, int64_t from, int64_t to) {
  for (int64_t step = from; step < to; ++step) {
    training.zero_grad();
    classified(training.forward(bench.batch(step)), step, bench).backward();
    training.step();
  }
}

}  // namespace

Behaviours programs_transfer() {
  return {
      {"program_transfer_of_fixed_features",
       [](Bench& bench) {
         auto scripted = backbone();
         scripted.eval();
         auto head = std::make_shared<Perceptron>(7, 6, 3, 64);
         auto training = bench.wrap(head);
         for (int64_t step = 0; step < 4; ++step) {
           at::Tensor x;
           {
             const torch::NoGradGuard guard;
             x = features(scripted, bench.batch(step));
           }
           training->zero_grad();
           classified(training->forward(x), step, bench).backward();
           training->step();
         }
         bench.same_parameters(*head);
       }},
      {"program_transfer_with_a_frozen_backbone",
       [](Bench& bench) {
         auto model = std::make_shared<Classifier>(false);
         auto training = bench.wrap(model);
         epochs(bench, *training, 0, 4);
         bench.same_parameters(*model);
       }},
      {"program_transfer_that_trains_the_backbone",
       [](Bench& bench) {
         auto model = std::make_shared<Classifier>(true);
         auto training = bench.wrap(model);
         epochs(bench, *training, 0, 4);
         bench.same_parameters(*model);
       }},
      {"program_transfer_that_thaws_a_layer",
       [](Bench& bench) {
         auto model = std::make_shared<Classifier>(false);
         set_trainable(*model->hidden, false);
         auto training = bench.wrap(model);
         epochs(bench, *training, 0, 2);
         set_trainable(*model->hidden, true);
         epochs(bench, *training, 2, 4);
         bench.same_parameters(*model);
       }},
      {"program_transfer_that_wraps_again_to_thaw",
       [](Bench& bench) {
         auto model = std::make_shared<Classifier>(false);
         set_trainable(*model->hidden, false);
         {
           auto training = bench.wrap(model);
           epochs(bench, *training, 0, 2);
           training->unwrap();
         }
         set_trainable(*model->hidden, true);
         auto training = bench.wrap(model);
         epochs(bench, *training, 2, 4);
         bench.same_parameters(*model);
       }},
  };
}

}  // namespace shoal::test
