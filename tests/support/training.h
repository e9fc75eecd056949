#pragma once
// One training loop over any strategy, so that a test is written once and runs on all of them.

#include <torch/torch.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "shoal/strategy/ddp.h"
#include "shoal/strategy/megatron/distributed_optimizer.h"
#include "shoal/strategy/zero/sharded_ddp.h"

namespace shoal::test {

struct TrainingOptions {
  bool find_unused_parameters = false;
  double bucket_mb = 25;
};

// libtorch lists a tied parameter under each of its names.
inline std::vector<at::Tensor> distinct(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> list;
  for (const auto& parameter : parameters) {
    const bool seen = std::any_of(list.begin(), list.end(), [&](const at::Tensor& t) { return t.is_same(parameter); });
    if (!seen) list.push_back(parameter);
  }
  return list;
}

// A model under a strategy, and the optimizer that goes with it.
template <class Module>
class Training {
 public:
  using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>;

  template <class Optimizer, class Defaults>
  static Training make(const std::string& strategy, std::shared_ptr<Module> model, const Group& group,
                       const Defaults& defaults, const TrainingOptions& options = {}) {
    Training training(std::move(model));
    const auto parameters = distinct(training.model->parameters());
    if (strategy == "megatron") {
      training.megatron_ = std::make_shared<DistributedOptimizer<Optimizer>>(
          training.model, defaults, group,
          DistributedOptimizerOptions{.bucket_size = static_cast<int64_t>(options.bucket_mb * (1 << 18)) + 1});
      training.optimizer_ = training.megatron_;
      return training;
    }
    if (strategy == "zero1" || strategy == "zero2") {
      training.oss_ = std::make_shared<OSS<Optimizer>>(parameters, defaults, group);
      training.optimizer_ = training.oss_;
    } else {
      training.optimizer_ = std::make_shared<Optimizer>(parameters, defaults);
    }
    if (strategy == "zero2") {
      training.sharded_ = std::make_shared<ShardedDataParallel<Module>>(
          training.model, *training.oss_, group,
          ShardedDataParallelOptions{.find_unused_parameters = options.find_unused_parameters,
                                     .reduce_buffer_size = static_cast<int64_t>(options.bucket_mb * (1 << 18)) + 1});
    } else {
      training.ddp_ = std::make_shared<DistributedDataParallel<Module>>(
          training.model, group,
          DistributedDataParallelOptions{.find_unused_parameters = options.find_unused_parameters,
                                         .bucket_cap_mb = options.bucket_mb,
                                         .first_bucket_mb = options.bucket_mb});
    }
    return training;
  }

  template <class... Arguments>
  auto forward(Arguments&&... arguments) {
    if (megatron_) return model->forward(std::forward<Arguments>(arguments)...);
    return sharded_ ? sharded_->forward(std::forward<Arguments>(arguments)...)
                    : ddp_->forward(std::forward<Arguments>(arguments)...);
  }
  void backward(const at::Tensor& loss_sum, double weight) {
    with_wrapper([&](auto& wrapper) { wrapper.backward(loss_sum, weight); });
  }
  NoSync no_sync(bool accumulate) {
    return with_wrapper([&](auto& wrapper) { return wrapper.no_sync(accumulate); });
  }
  void step() { megatron_ ? static_cast<void>(megatron_->step()) : static_cast<void>(optimizer_->step()); }
  void zero_grad() { megatron_ ? megatron_->zero_grad() : optimizer_->zero_grad(); }
  // After an exception on this rank.
  void reset() {
    if (megatron_) megatron_->abandon_step();
    if (sharded_) sharded_->reset();
    if (ddp_) ddp_->reset();
  }

  std::shared_ptr<Module> model;
  torch::optim::Optimizer& optimizer() { return *optimizer_; }

 private:
  explicit Training(std::shared_ptr<Module> module) : model(std::move(module)) {}

  template <class Act>
  auto with_wrapper(const Act& act) {
    if (megatron_) return act(*megatron_);
    return sharded_ ? act(*sharded_) : act(*ddp_);
  }

  std::shared_ptr<torch::optim::Optimizer> optimizer_;
  std::shared_ptr<DistributedOptimizerCore> megatron_;
  std::shared_ptr<OSSCore> oss_;
  std::shared_ptr<DistributedDataParallel<Module>> ddp_;
  std::shared_ptr<ShardedDataParallel<Module>> sharded_;
};

}  // namespace shoal::test
