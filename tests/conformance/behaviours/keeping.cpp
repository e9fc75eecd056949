// Tensors that a program keeps beside the model, on the memory of its gradients or parameters.

#include <torch/nn/modules/embedding.h>

#include "tests/conformance/behaviours.h"

namespace shoal::test {
namespace {

at::Tensor loss_at(Bench& bench, Trained& training, int64_t step) {
  return training.forward(bench.batch(step)).pow(2).mean();
}

double norm_over(const std::vector<at::Tensor>& tensors) {
  double sum = 0;
  for (const auto& tensor : tensors) sum += tensor.pow(2).sum().item<double>();
  return std::sqrt(sum);
}

// The list is made once; later steps clip through it.
void gradients_in_a_list(Bench& bench) {
  auto model = perceptron();
  auto training = bench.wrap(model);
  std::vector<at::Tensor> list;
  for (int64_t step = 0; step < 4; ++step) {
    model->zero_grad(/*set_to_none=*/false);
    loss_at(bench, *training, step).backward();
    if (list.empty()) {
      for (const auto& parameter : model->parameters()) list.push_back(parameter.grad());
    }
    const torch::NoGradGuard guard;
    const auto norm = norm_over(list);
    bench.same("norm", norm);
    for (auto& gradient : list) gradient.mul_(0.1 / norm);
    training->step();
  }
  bench.same_parameters(*model);
}

// As for the cosine of two tasks' gradients, or of this step's and the last one's.
template <class Keep>
void gradients_without_a_copy(Bench& bench, const Keep& keep) {
  auto model = perceptron();
  auto training = bench.wrap(model);
  std::vector<std::vector<at::Tensor>> all;
  for (int64_t step = 0; step < 4; ++step) {
    training->zero_grad();
    loss_at(bench, *training, step).backward();
    auto& kept = all.emplace_back();
    for (const auto& parameter : model->parameters()) kept.push_back(keep(parameter.grad()));
    training->step();
  }
  for (const auto& kept : all) bench.same("gradients of a step", kept);
  bench.same_parameters(*model);
}

// Gradients are parts of one flat tensor, which is scaled and zeroed as a whole.
void gradients_in_a_flat_tensor(Bench& bench) {
  auto model = perceptron();
  auto training = bench.wrap(model);
  int64_t numel = 0;
  for (const auto& parameter : model->parameters()) numel += parameter.numel();
  const auto flat = at::zeros({numel}, at::kDouble);
  int64_t place = 0;
  for (auto& parameter : model->parameters()) {
    parameter.mutable_grad() = flat.narrow(0, place, parameter.numel()).view_as(parameter);
    place += parameter.numel();
  }
  for (int64_t step = 0; step < 4; ++step) {
    loss_at(bench, *training, step).backward();
    bench.same("flat gradients", flat);
    at::Tensor(flat).mul_(0.5);
    training->step();
    at::Tensor(flat).zero_();
  }
  bench.same_parameters(*model);
}

struct Doubled : Network {
  Doubled() {
    torch::manual_seed(5);
    inside = register_module("inside", torch::nn::Linear(6, 6));
    outside = register_module("outside", torch::nn::Linear(6, 6));
    to(at::kDouble);
  }
  using Network::forward;
  at::Tensor forward(at::Tensor x) override {
    const auto y = outside(torch::tanh(inside(x)));
    return buffer.defined() ? y.matmul(buffer) : y;
  }

  torch::nn::Linear inside{nullptr}, outside{nullptr};
  at::Tensor buffer;
};

template <class Module>
void trains_as_one_process(Bench& bench, const std::shared_ptr<Module>& model) {
  auto training = bench.wrap(model);
  for (int64_t step = 0; step < 3; ++step) {
    training->zero_grad();
    loss_at(bench, *training, step).backward();
    training->step();
  }
  bench.same_parameters(*model);
}

// Tied as in a port of a Python program: head.weight.data = embedding.weight.data.
void tied_by_memory(Bench& bench) {
  auto model = std::make_shared<Doubled>();
  model->outside->weight.set_data(model->inside->weight.data());
  trains_as_one_process(bench, model);
}

void a_buffer_of_a_parameter(Bench& bench) {
  auto model = std::make_shared<Doubled>();
  model->buffer = model->register_buffer("view", model->inside->weight.detach());
  trains_as_one_process(bench, model);
}

struct Embedded : Network {
  Embedded() {
    torch::manual_seed(7);
    words = register_module("words", torch::nn::Embedding(torch::nn::EmbeddingOptions(12, 3).max_norm(0.5)));
    to(at::kDouble);
  }
  using Network::forward;
  at::Tensor forward(at::Tensor x) override { return words(x.select(1, 0).abs().mul(4).to(at::kLong).clamp(0, 11)); }

  torch::nn::Embedding words{nullptr};
};

void with_buffer(Bench& bench, const at::Tensor& buffer) {
  auto model = std::make_shared<Doubled>();
  model->register_buffer("graph", buffer);
  trains_as_one_process(bench, model);
}

// A penalty on gradients that backward has left in grad().
void penalty_on_grad(Bench& bench) {
  auto model = perceptron();
  auto training = bench.wrap(model);
  for (int64_t step = 0; step < 3; ++step) {
    training->zero_grad();
    loss_at(bench, *training, step).backward(/*gradient=*/{}, /*retain_graph=*/true, /*create_graph=*/true);
    auto penalty = at::zeros({}, at::kDouble);
    for (const auto& parameter : model->parameters()) penalty = penalty + parameter.grad().pow(2).sum();
    for (auto& parameter : model->parameters()) parameter.mutable_grad().reset();
    penalty.backward();
    training->step();
  }
  bench.same_parameters(*model);
}

}  // namespace

Behaviours keeping() {
  return {
      {"gradients_kept_in_a_list_for_clipping", gradients_in_a_list},
      {"gradients_kept_without_a_copy",
       [](Bench& bench) { gradients_without_a_copy(bench, [](const at::Tensor& grad) { return grad; }); }},
      {"views_of_gradients_kept",
       [](Bench& bench) {
         gradients_without_a_copy(bench, [](const at::Tensor& grad) { return grad.detach().view(-1); });
       }},
      {"gradients_in_a_flat_tensor", gradients_in_a_flat_tensor},
      {"two_parameters_on_one_memory", tied_by_memory},
      {"a_buffer_on_the_memory_of_a_parameter", a_buffer_of_a_parameter},
      {"an_embedding_with_max_norm", [](Bench& bench) { trains_as_one_process(bench, std::make_shared<Embedded>()); }},
      {"an_expanded_buffer", [](Bench& bench) { with_buffer(bench, at::ones({1}, at::kDouble).expand({4})); }},
      {"a_sparse_buffer", [](Bench& bench) { with_buffer(bench, at::eye(4, at::kDouble).to_sparse()); }},
      {"a_penalty_on_grad_with_create_graph", penalty_on_grad},
  };
}

}  // namespace shoal::test
