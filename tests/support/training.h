#pragma once
// One training loop over any strategy, so that a test is written once and runs on all of them.

#include <torch/torch.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "shoal/strategy/ddp.h"
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
    return sharded_ ? sharded_->forward(std::forward<Arguments>(arguments)...)
                    : ddp_->forward(std::forward<Arguments>(arguments)...);
  }
  void backward(const at::Tensor& loss_sum, double weight) {
    sharded_ ? sharded_->backward(loss_sum, weight) : ddp_->backward(loss_sum, weight);
  }
  NoSync no_sync(bool accumulate) { return sharded_ ? sharded_->no_sync(accumulate) : ddp_->no_sync(accumulate); }
  void step() { optimizer_->step(); }
  void zero_grad() { optimizer_->zero_grad(); }
  void reset() { sharded_ ? sharded_->reset() : ddp_->reset(); }

  std::shared_ptr<Module> model;
  torch::optim::Optimizer& optimizer() { return *optimizer_; }

 private:
  explicit Training(std::shared_ptr<Module> module) : model(std::move(module)) {}

  std::shared_ptr<torch::optim::Optimizer> optimizer_;
  std::shared_ptr<OSSCore> oss_;
  std::shared_ptr<DistributedDataParallel<Module>> ddp_;
  std::shared_ptr<ShardedDataParallel<Module>> sharded_;
};

}  // namespace shoal::test
