#pragma once
// A model with an optional layer, and its training loop given as a word: under a strategy, and in one process.

#include <gtest/gtest.h>
#include <torch/optim/sgd.h>

#include <memory>
#include <string>
#include <vector>

#include "tests/support/models.h"
#include "tests/support/training.h"
#include "tests/support/world.h"

namespace shoal::test::gradients_loop {

// Its third layer is optional.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    first = register_module("first", torch::nn::Linear(12, 8));
    second = register_module("second", torch::nn::Linear(8, 7));
    third = register_module("third", torch::nn::Linear(7, 7));
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto y = torch::tanh(second(torch::tanh(first(x))));
    return leave_out ? y : third(y);
  }

  torch::nn::Linear first{nullptr}, second{nullptr}, third{nullptr};
  bool leave_out = false;
};
TORCH_MODULE(Net);

inline Net net() {
  torch::manual_seed(7);
  return Net();
}

inline const torch::optim::SGDOptions sgd_with_decay = torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.05);

// Training loop given as a word, one letter per action:
//   b B  backward, of all layers or without the third     l L  the same under no_sync
//   f    forward alone                                     x X  forward, zero_grad(true or false), backward
//   z Z  optimizer.zero_grad(true or false)                m M  model->zero_grad(true or false)
//   h H  grad() of each parameter undefined, or zeroed     p P  first->zero_grad(true or false)
//   w    grad() of each parameter set to something else    s    step
// In one process on the whole batch, or under a strategy.
class Loop {
 public:
  Loop() : model_(net()), alone_(std::make_shared<torch::optim::SGD>(model_->parameters(), sgd_with_decay)) {}
  explicit Loop(const std::string& strategy) : model_(net()) {
    training_ = std::make_shared<Training<NetImpl>>(Training<NetImpl>::make<torch::optim::SGD>(
        strategy, model_.ptr(), group(), sgd_with_decay, {.find_unused_parameters = true, .bucket_mb = 0.0003}));
  }

  void run(char letter) {
    switch (letter) {
      case 'b':
      case 'B':
        return backward(letter == 'B', /*local=*/false, [] {});
      case 'l':
      case 'L':
        return backward(letter == 'L', /*local=*/true, [] {});
      case 'f':
        return static_cast<void>(forward(group().rank()));
      case 'x':
      case 'X':
        return backward(false, false, [&] { optimizer().zero_grad(letter == 'x'); });
      case 'z':
      case 'Z':
        return optimizer().zero_grad(letter == 'z');
      case 'm':
      case 'M':
        return model_->zero_grad(letter == 'm');
      case 'h':
      case 'H':
        return set_by_hand(letter == 'h' ? "undefined" : "zero");
      case 'p':
      case 'P':
        return model_->first->zero_grad(letter == 'p');
      case 'w':
        return set_by_hand("other");
      default:
        return training_ ? training_->step() : static_cast<void>(alone_->step());
    }
  }

  torch::optim::Optimizer& optimizer() { return training_ ? training_->optimizer() : *alone_; }
  std::vector<at::Tensor> parameters() const { return model_->parameters(); }
  Net& model() { return model_; }
  bool alone() const { return training_ == nullptr; }
  at::Tensor apply(const at::Tensor& x) { return training_ ? training_->forward(x) : model_->forward(x); }

 private:
  at::Tensor forward(int rank) { return mean_loss(apply(batch(rank, number_))); }

  template <class Between>
  void backward(bool leave_out, bool local, const Between& between) {
    ++number_;
    model_->leave_out = leave_out;
    if (training_) {
      const auto scope = training_->no_sync(local);
      const auto loss = forward(group().rank());
      between();
      loss.backward();
    } else {
      at::Tensor loss = at::zeros({}, at::kDouble);
      for (int rank = 0; rank < group().size(); ++rank) loss = loss + forward(rank) / group().size();
      between();
      loss.backward();
    }
    model_->leave_out = false;
  }

  void set_by_hand(const std::string& what) {
    for (auto& parameter : model_->parameters()) {
      auto& grad = parameter.mutable_grad();
      if (what == "other") {
        // Libtorch detaches no views.
        grad = at::linspace(-1, 1, parameter.numel(), at::kDouble).view(parameter.sizes()).clone();
      } else if (grad.defined() && what == "zero") {
        grad.zero_();
      } else {
        grad.reset();
      }
    }
  }

  Net model_;
  std::shared_ptr<torch::optim::SGD> alone_;
  std::shared_ptr<Training<NetImpl>> training_;
  int64_t number_ = 0;
};

// Parameters are gathered into the gradients' memory in a step, so that gradients must be dropped after it.
inline std::string for_strategy(const std::string& word, const std::string& strategy) {
  if (strategy != "megatron_in_grads") return word;
  std::string longer;
  for (size_t i = 0; i < word.size(); ++i) {
    longer += word[i];
    const bool dropped = i + 1 < word.size() && std::string("zZmMhHwx").find(word[i + 1]) != std::string::npos;
    if (word[i] == 's' && !dropped) longer += 'z';
  }
  return longer;
}

inline void expect_as_in_one_process(const std::string& word, const std::string& strategy) {
  Loop whole, parts(strategy);
  std::string past;
  for (const char letter : for_strategy(word, strategy)) {
    past += letter;
    whole.run(letter);
    ASSERT_NO_THROW(parts.run(letter)) << strategy << " " << past;
    if (letter == 's') {
      ASSERT_LT(difference(parts.parameters(), whole.parameters()), 1e-11) << strategy << " " << past;
    }
  }
}

class EveryStrategy : public ::testing::TestWithParam<std::string> {};

}  // namespace shoal::test::gradients_loop
