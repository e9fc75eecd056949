#pragma once
// A module as a user writes it: an embedding, a batch norm, a frozen layer, tied weights.

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <torch/utils.h>

namespace shoal::test {

struct OwnModule : torch::nn::Module {
  OwnModule() {
    words = register_module("words", torch::nn::Embedding(200, 64));
    wide = register_module("wide", torch::nn::Linear(64, 256));
    norm = register_module("norm", torch::nn::BatchNorm1d(256));
    fixed = register_module("fixed", torch::nn::Linear(256, 256));
    narrow = register_module("narrow", torch::nn::Linear(256, 64));
    for (auto& parameter : fixed->parameters()) parameter.requires_grad_(false);
    register_parameter("tied", words->weight);
  }
  at::Tensor forward(const at::Tensor& tokens) {
    return at::linear(narrow(fixed(torch::relu(norm(wide(words(tokens)))))), words->weight);
  }

  torch::nn::Embedding words{nullptr};
  torch::nn::Linear wide{nullptr}, fixed{nullptr}, narrow{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};

inline at::Tensor own_tokens(int rank) {
  return (at::arange(8, at::kLong) * 7 + rank) % 200;
}

template <class Model>
at::Tensor own_loss(Model& model, int rank) {
  return at::cross_entropy_loss(model.forward(own_tokens(rank)), own_tokens(rank + 1));
}

}  // namespace shoal::test
