// Whole programs: sequences with carried state, and episodes of unequal length.

#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/rnn.h>
#include <torch/nn/utils/clip_grad.h>

#include <cmath>

#include "tests/conformance/behaviours.h"

namespace shoal::test {
namespace {

at::Tensor words(int64_t seed, at::IntArrayRef shape, int64_t vocabulary) {
  return rows(seed, shape).abs().mul(4).to(at::kLong).clamp(0, vocabulary - 1);
}

at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets) {
  return at::cross_entropy_loss(logits.reshape({-1, logits.size(-1)}), targets.reshape({-1}));
}

// An LSTM under a GRU; the state is (LSTM's h and c, GRU's h).
struct LanguageModel : Network {
  LanguageModel() {
    torch::manual_seed(41);
    table = register_module("table", torch::nn::Embedding(9, 5));
    lstm = register_module("lstm", torch::nn::LSTM(torch::nn::LSTMOptions(5, 6).batch_first(true)));
    gru = register_module("gru", torch::nn::GRU(torch::nn::GRUOptions(6, 6).batch_first(true)));
    out = register_module("out", torch::nn::Linear(6, 9));
    to(at::kDouble);
  }
  using Network::forward;
  std::tuple<at::Tensor, TensorPair> forward(at::Tensor tokens, TensorPair state) override {
    const auto& [cells, hidden] = state;
    auto [x, carried] = lstm->forward(table->forward(tokens), std::tuple(cells[0], cells[1]));
    auto [y, next] = gru->forward(x, hidden);
    return {out->forward(y), {at::stack({std::get<0>(carried), std::get<1>(carried)}), next}};
  }
  torch::nn::Embedding table{nullptr};
  torch::nn::LSTM lstm{nullptr};
  torch::nn::GRU gru{nullptr};
  torch::nn::Linear out{nullptr};
};

void language_model(Bench& bench, bool clip_by_torch) {
  auto model = std::make_shared<LanguageModel>();
  Setup setup;
  setup.optimizer = torch::optim::SGDOptions(0.5);
  if (!clip_by_torch) setup.clip = 0.25;
  auto training = bench.wrap(model, setup);
  const auto text = bench.share(words(1, {12, 21}, 9));
  const int64_t sentences = text.size(0);
  TensorPair state{at::zeros({2, 1, sentences, 6}, at::kDouble), at::zeros({1, sentences, 6}, at::kDouble)};
  for (int64_t at = 0; at + 5 < 21; at += 5) {
    state = {std::get<0>(state).detach(), std::get<1>(state).detach()};
    training->zero_grad();
    auto [logits, next] = training->forward(text.narrow(1, at, 5), state);
    auto loss = cross_entropy(logits, text.narrow(1, at + 1, 5));
    loss.backward();
    if (clip_by_torch) torch::nn::utils::clip_grad_norm_(model->parameters(), 0.25);
    training->step();
    state = next;
  }
  {
    const torch::NoGradGuard guard;
    model->eval();
    const auto test = words(2, {4, 6}, 9);
    const auto [logits, ignored] =
        training->forward(test, {at::zeros({2, 1, 4, 6}, at::kDouble), at::zeros({1, 4, 6}, at::kDouble)});
    bench.same("perplexity", std::exp(cross_entropy(logits, test).item<double>()), 1e-8);
  }
  bench.same_parameters(*model, 1e-8);
}

struct Encoder : Network {
  Encoder() {
    torch::manual_seed(42);
    table = register_module("table", torch::nn::Embedding(7, 5));
    gru = register_module("gru", torch::nn::GRU(torch::nn::GRUOptions(5, 6).batch_first(true)));
    to(at::kDouble);
  }
  using Network::forward;
  at::Tensor forward(at::Tensor tokens) override { return std::get<1>(gru->forward(table->forward(tokens))); }
  torch::nn::Embedding table{nullptr};
  torch::nn::GRU gru{nullptr};
};

// Takes one word and the state; returns the next word's logits and state.
struct Decoder : Network {
  Decoder() {
    torch::manual_seed(43);
    table = register_module("table", torch::nn::Embedding(7, 5));
    gru = register_module("gru", torch::nn::GRU(torch::nn::GRUOptions(5, 6).batch_first(true)));
    out = register_module("out", torch::nn::Linear(6, 7));
    to(at::kDouble);
  }
  using Network::forward;
  TensorPair forward(at::Tensor word, at::Tensor state) override {
    auto [y, next] = gru->forward(table->forward(word), state);
    return {out->forward(y), next};
  }
  torch::nn::Embedding table{nullptr};
  torch::nn::GRU gru{nullptr};
  torch::nn::Linear out{nullptr};
};

// Both in one module, which the strategy wraps.
struct Translator : Network {
  Translator() {
    encoder = register_module("encoder", std::make_shared<Encoder>());
    decoder = register_module("decoder", std::make_shared<Decoder>());
  }
  using Network::forward;
  TensorPair forward(at::Tensor source, at::Tensor target) override {
    auto state = encoder->forward(source);
    Tensors logits;
    for (int64_t i = 0; i + 1 < target.size(1); ++i) {
      auto [step, next] = decoder->forward(target.narrow(1, i, 1), state);
      logits.push_back(step);
      state = next;
    }
    return {at::cat(logits, 1), state};
  }
  std::shared_ptr<Encoder> encoder;
  std::shared_ptr<Decoder> decoder;
};

Setup adam() {
  Setup setup;
  setup.optimizer = torch::optim::AdamOptions(0.01);
  return setup;
}

void seq2seq_in_one_module(Bench& bench) {
  auto model = std::make_shared<Translator>();
  auto training = bench.wrap(model, adam());
  for (int64_t step = 0; step < 3; ++step) {
    const auto source = bench.share(words(step, {12, 4}, 7)), target = bench.share(words(step + 10, {12, 5}, 7));
    auto loss = cross_entropy(std::get<0>(training->forward(source, target)), target.narrow(1, 1, 4));
    training->zero_grad();
    loss.backward();
    training->step();
  }
  bench.same_parameters(*model, 1e-8);
}

// Calls the decoder word by word; steps all `optimizers`.
void seq2seq(Bench& bench, Trained& encoder, Trained& decoder, const std::vector<Trained*>& optimizers) {
  for (int64_t step = 0; step < 3; ++step) {
    for (auto* training : optimizers) training->zero_grad();
    const auto source = bench.share(words(step, {12, 4}, 7)), target = bench.share(words(step + 10, {12, 5}, 7));
    auto state = encoder.forward(source);
    at::Tensor loss = at::zeros({}, at::kDouble);
    auto word = target.narrow(1, 0, 1);
    for (int64_t i = 0; i < 4; ++i) {
      auto [logits, next] = decoder.forward(word, state);
      word = target.narrow(1, i + 1, 1);
      loss = loss + cross_entropy(logits, word);
      state = next;
    }
    loss.backward();
    for (auto* training : optimizers) training->step();
  }
}

void seq2seq_with_two_optimizers(Bench& bench) {
  auto encoder = std::make_shared<Encoder>();
  auto decoder = std::make_shared<Decoder>();
  auto first = bench.wrap(encoder, adam()), second = bench.wrap(decoder, adam());
  seq2seq(bench, *first, *second, {first.get(), second.get()});
  bench.same_parameters(*encoder, 1e-8);
  bench.same_parameters(*decoder, 1e-8);
}

void seq2seq_with_one_optimizer(Bench& bench) {
  auto encoder = std::make_shared<Encoder>();
  auto decoder = std::make_shared<Decoder>();
  Setup of_both = adam();
  of_both.groups = [&] {
    auto parameters = encoder->parameters();
    for (const auto& parameter : decoder->parameters()) parameters.push_back(parameter);
    ParamGroups groups;
    groups.emplace_back(parameters);
    return groups;
  };
  auto first = bench.wrap(encoder, of_both);
  Setup of_nobody = adam();
  of_nobody.optimizer_of = first.get();
  auto second = bench.wrap(decoder, of_nobody);
  seq2seq(bench, *first, *second, {first.get()});
  bench.same_parameters(*encoder, 1e-8);
  bench.same_parameters(*decoder, 1e-8);
}

// Episode of a walk on a line: log probabilities of the actions, times the discounted rewards that followed. Calls the
// policy step by step. Episodes have unequal lengths.
std::pair<at::Tensor, int64_t> episode(Trained& policy, int64_t number, int part) {
  const int64_t length = 3 + (number + 2 * part) % 4;
  const auto chance = rows(1000 * number + part, {length}).sigmoid();
  auto place = rows(31 * number + part, {1, 4});
  Tensors chosen;
  std::vector<double> rewards;
  for (int64_t step = 0; step < length; ++step) {
    const auto probabilities = at::log_softmax(policy.forward(place), 1);
    const int64_t action = chance[step].item<double>() < 0.5 ? 0 : 1;
    chosen.push_back(probabilities[0][action]);
    rewards.push_back(place.sum().item<double>() * (action == 0 ? 1 : -1));
    place = (place + (action == 0 ? 0.1 : -0.1)).detach();
  }
  at::Tensor loss = at::zeros({}, at::kDouble);
  double discounted = 0;
  for (int64_t step = length - 1; step >= 0; --step) {
    discounted = rewards[step] + 0.9 * discounted;
    loss = loss - chosen[step] * discounted;
  }
  return {loss, length};
}

void reinforce(Bench& bench) {
  auto model = std::make_shared<Perceptron>(4, 8, 2, 51);
  auto training = bench.wrap(model, adam());
  for (int64_t number = 0; number < 4; ++number) {
    training->zero_grad();
    if (bench.one_process()) {
      at::Tensor sum = at::zeros({}, at::kDouble);
      int64_t steps = 0;
      for (int part = 0; part < bench.parts(); ++part) {
        auto [loss, length] = episode(*training, number, part);
        sum = sum + loss;
        steps += length;
      }
      (sum / steps).backward();
    } else {
      auto [loss, length] = episode(*training, number, bench.part().number);
      if (bench.part().of == 1) {
        (loss / length).backward();
      } else {
        training->backward(loss, static_cast<double>(length));  // the mean over all steps of all ranks
      }
    }
    training->step();
  }
  bench.same_parameters(*model, 1e-8);
}

}  // namespace

Behaviours programs_sequences() {
  return {
      {"program_language_model", [](Bench& bench) { language_model(bench, false); }},
      {"program_language_model_clipped_by_torch", [](Bench& bench) { language_model(bench, true); }},
      {"program_seq2seq_in_one_module", seq2seq_in_one_module},
      {"program_seq2seq_with_two_optimizers", seq2seq_with_two_optimizers},
      {"program_seq2seq_with_one_optimizer", seq2seq_with_one_optimizer},
      {"program_reinforce", reinforce},
  };
}

}  // namespace shoal::test
