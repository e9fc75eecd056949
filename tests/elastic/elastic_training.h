#pragma once
// What the tests of elastic training train: a small net, its optimizers, and their wrappers.

#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/elastic/guarded_update.h"
#include "engine/sharded/changed_values.h"
#include "optim/state.h"
#include "shoal/ddp.h"
#include "shoal/detail/optimizer_state.h"
#include "shoal/optim.h"
#include "shoal/zero.h"

namespace shoal::test {

// Uses random numbers in forward, and counts its forwards in a buffer.
struct Net : torch::nn::Module {
  explicit Net(int64_t width = 24) {
    torch::manual_seed(7);
    first = register_module("first", torch::nn::Linear(4, width));
    second = register_module("second", torch::nn::Linear(width, width));
    third = register_module("third", torch::nn::Linear(width, 1));
    forwards = register_buffer("forwards", at::zeros({1}, at::kLong));
  }
  at::Tensor forward(const at::Tensor& x) {
    forwards.add_(1);
    const auto noisy = x + 0.01 * at::randn_like(x);
    return third(at::tanh(second(at::tanh(first(noisy)))));
  }
  torch::nn::Linear first{nullptr}, second{nullptr}, third{nullptr};
  at::Tensor forwards;
};

inline at::Tensor inputs_of(const std::vector<size_t>& samples) {
  auto x = at::empty({static_cast<int64_t>(samples.size()), 4});
  for (size_t i = 0; i < samples.size(); ++i) {
    for (int j = 0; j < 4; ++j) {
      x[static_cast<int64_t>(i)][j] = static_cast<double>((samples[i] * 37 + j * 11) % 101) / 50 - 1;
    }
  }
  return x;
}

inline at::Tensor loss_of(const at::Tensor& y, const at::Tensor& x) {
  return (y.squeeze(1) - x.sum(1)).square().mean();
}

class Hash {
 public:
  void add(const at::Tensor& tensor) { value = (value ^ digest_of(tensor)) * 1099511628211U; }
  uint64_t value = 14695981039346656037U;
};

inline uint64_t hash_of(const OptimizerState& whole, const torch::nn::Module& module) {
  Hash hash;
  for (const auto& parameter : module.parameters()) hash.add(parameter);
  for (const auto& [name, state] : whole) {
    for (const auto& [field, tensor] : state.tensors) hash.add(tensor);
    for (const auto& [field, number] : state.numbers) hash.add(at::scalar_tensor(number, at::kDouble));
  }
  return hash.value;
}

inline uint64_t hash_of(const torch::optim::Optimizer& optimizer, const torch::nn::Module& module) {
  return hash_of(optimizer_state(optimizer, module), module);
}

constexpr uint64_t seed_of_ranks = 100;
constexpr double learning_rate = 0.01;

enum class Sharding { none, zero1, zero2 };

// What is trained, and how.
struct Trained {
  Sharding sharding = Sharding::none;
  std::string optimizer = "adam";
  int64_t width = 24;  // of the net; 258: a matrix is updated in two chunks
};

// Calls `act` with a pointer to the optimizer's class and its options.
template <class Act>
auto with_optimizer(const Trained& trained, const Act& act) {
  using namespace torch::optim;
  if (trained.optimizer == "adamw") return act(static_cast<AdamW*>(nullptr), AdamWOptions(learning_rate));
  if (trained.optimizer == "sgd") return act(static_cast<SGD*>(nullptr), SGDOptions(learning_rate).momentum(0.9));
  if (trained.optimizer == "lamb") return act(static_cast<Lamb*>(nullptr), LambOptions(learning_rate));
  return act(static_cast<Adam*>(nullptr), AdamOptions(learning_rate));
}

// Called at each step of a local optimizer, which is a chunk of an update: before and after it.
inline std::function<void(torch::optim::Optimizer& local, bool after)> at_chunk;

template <class Local>
class Chunked : public Local {
 public:
  using Local::Local;
  at::Tensor step(torch::optim::Optimizer::LossClosure closure = nullptr) override {
    at_chunk(*this, false);
    auto loss = Local::step(std::move(closure));
    at_chunk(*this, true);
    return loss;
  }
};

}  // namespace shoal::test

template <class Local>
inline constexpr bool shoal::element_wise<shoal::test::Chunked<Local>> = shoal::element_wise<Local>;

namespace shoal::test {

// What a rank that is killed within an update may have left: bytes that are neither the former ones nor the new ones.
inline void spoil(torch::optim::Optimizer& local) {
  const torch::NoGradGuard no_grad;
  for (auto& group : local.param_groups()) {
    for (auto& parameter : group.params()) {
      parameter.fill_(777);
      const auto state = local.state().find(parameter.unsafeGetTensorImpl());
      if (state == local.state().end()) continue;
      for (const auto& [name, tensor] : named_state(*state->second).tensors) tensor.fill_(-5);
    }
  }
}

// A wrapper and its optimizer.
struct Wrapped {
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  std::unique_ptr<DataParallelCore> parallel;
  std::function<at::Tensor(const at::Tensor&)> forward;

  OSSCore* oss() const { return dynamic_cast<OSSCore*>(optimizer.get()); }
};

inline Wrapped wrap_as(const Trained& trained, const std::shared_ptr<Net>& net, const Group& group) {
  return with_optimizer(trained, [&]<class Local>(Local*, const auto& options) {
    Wrapped wrapped;
    const auto keep = [&](auto parallel) {
      wrapped.forward = [to = parallel.get()](const at::Tensor& x) { return to->forward(x); };
      wrapped.parallel = std::move(parallel);
    };
    if (trained.sharding == Sharding::none) {
      wrapped.optimizer = std::make_unique<Local>(net->parameters(), options);
    } else {
      wrapped.optimizer = std::make_unique<OSS<Chunked<Local>>>(net->parameters(), options, group);
    }
    if (trained.sharding == Sharding::zero2) {
      ShardedDataParallelOptions small;
      small.reduce_buffer_size = 256;  // several buckets
      small.log_sizes = false;
      keep(std::make_unique<ShardedDataParallel<Net>>(net, *wrapped.oss(), group, small));
    } else {
      DistributedDataParallelOptions small;
      small.first_bucket_mb = 1e-3;
      small.bucket_cap_mb = 1e-3;
      keep(std::make_unique<DistributedDataParallel<Net>>(net, group, small));
    }
    return wrapped;
  });
}

// Number of chunks that a rank updates.
inline int64_t chunks_of(const OSSCore& oss, bool cut) {
  constexpr int64_t chunk = GuardedUpdate::chunk_numel;
  int64_t chunks = 0;
  for (const auto& parameter : oss.local_params()) chunks += cut ? (parameter.numel() + chunk - 1) / chunk : 1;
  return chunks;
}

}  // namespace shoal::test
