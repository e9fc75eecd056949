#pragma once
// One training loop over any strategy, so that a test is written once and runs on all of them.

#include <torch/optim/optimizer.h>
#include <torch/types.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/gradients/gradient_norm.h"
#include "shoal/ddp.h"
#include "shoal/fsdp.h"
#include "shoal/megatron.h"
#include "shoal/zero.h"

namespace shoal::test {

struct TrainingOptions {
  bool find_unused_parameters = false;
  bool static_graph = false;  // where the strategy has it
  double bucket_mb = 25;
  double clip = 0;              // largest norm of all gradients together; 0: no clipping
  Precision precision{};        // of a model that has its dtype already
  bool fp32_gradients = false;  // of 16-bit parameters
  std::shared_ptr<CommunicationHook> hook{};
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

  // strategy: ddp, zero1, zero2, megatron, megatron_in_grads (parameters are gathered in the gradients' memory),
  // megatron_no_overlap (gradients are summed up in step()), megatron_late_gather (parameters come in at their next
  // use), fsdp, fsdp_grad_op, fsdp_no_shard, fsdp_hybrid or fsdp_hybrid_grad_op (of two ranks each).
  template <class Optimizer, class Defaults>
  static Training make(const std::string& strategy, std::shared_ptr<Module> model, const Group& group,
                       const Defaults& defaults, const TrainingOptions& options = {}) {
    Training training(std::move(model), options.clip);
    const auto parameters = distinct(training.model->parameters());
    if (strategy.starts_with("megatron")) {
      training.megatron_ = std::make_shared<DistributedOptimizer<Optimizer>>(
          training.model, defaults, group,
          DistributedOptimizerOptions{.overlap_grad_reduce = strategy != "megatron_no_overlap",
                                      .overlap_param_gather = strategy == "megatron_late_gather",
                                      .reuse_grad_buf_for_param_gather = strategy == "megatron_in_grads",
                                      .grad_reduce_in_fp32 = options.fp32_gradients,
                                      .clip_grad = options.clip,
                                      .scaler = options.precision.scaler,
                                      .communication_hook = options.hook,
                                      .bucket_size = static_cast<int64_t>(options.bucket_mb * (1 << 18)) + 1});
      training.optimizer_ = training.megatron_;
      return training;
    }
    if (strategy.starts_with("fsdp")) {
      make_fsdp<Optimizer>(training, strategy, group, defaults, options);
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
                                     .grad_reduce_in_fp32 = options.fp32_gradients,
                                     .precision = options.precision,
                                     .communication_hook = options.hook,
                                     .reduce_buffer_size = static_cast<int64_t>(options.bucket_mb * (1 << 18)) + 1});
    } else {
      training.ddp_ = std::make_shared<DistributedDataParallel<Module>>(
          training.model, group,
          DistributedDataParallelOptions{.find_unused_parameters = options.find_unused_parameters,
                                         .static_graph = options.static_graph,
                                         .grad_reduce_in_fp32 = options.fp32_gradients,
                                         .precision = options.precision,
                                         .communication_hook = options.hook,
                                         .bucket_cap_mb = options.bucket_mb,
                                         .first_bucket_mb = options.bucket_mb});
    }
    return training;
  }

  template <class... Arguments>
  auto forward(Arguments&&... arguments) {
    if (megatron_) return model->forward(std::forward<Arguments>(arguments)...);
    if (fsdp_) return fsdp_->forward(std::forward<Arguments>(arguments)...);
    return sharded_ ? sharded_->forward(std::forward<Arguments>(arguments)...)
                    : ddp_->forward(std::forward<Arguments>(arguments)...);
  }
  void backward(const at::Tensor& loss_sum, double weight) {
    with_wrapper([&](auto& wrapper) { wrapper.backward(loss_sum, weight); });
  }
  void shadow() {
    with_wrapper([](auto& wrapper) { wrapper.shadow(); });
  }
  operator Joinable&() {
    return with_wrapper([](auto& wrapper) -> Joinable& { return wrapper; });
  }
  NoSync no_sync(bool accumulate) {
    return with_wrapper([&](auto& wrapper) { return wrapper.no_sync(accumulate); });
  }
  LoggingData logging_data() {
    return with_wrapper([](auto& wrapper) { return wrapper.logging_data(); });
  }
  // Not of megatron.
  std::vector<std::vector<std::string>> buckets() const {
    if (fsdp_) return fsdp_->buckets();
    return sharded_ ? sharded_->buckets() : ddp_->buckets();
  }
  void step() {
    if (megatron_) return static_cast<void>(megatron_->step());
    if (fsdp_) return static_cast<void>(fsdp_optimizer_->step());
    if (clip_ > 0) oss_ ? static_cast<void>(oss_->clip_grad_norm(clip_)) : clip_whole();
    optimizer_->step();
  }
  void zero_grad() {
    if (megatron_) return megatron_->zero_grad();
    if (fsdp_) return fsdp_optimizer_->zero_grad();
    optimizer_->zero_grad();
  }
  // After an exception on this rank.
  void abandon_step() {
    if (megatron_) megatron_->abandon_step();
    if (sharded_) sharded_->abandon_step();
    if (ddp_) ddp_->abandon_step();
    if (fsdp_) fsdp_->abandon_step();
  }

  std::shared_ptr<Module> model;
  torch::optim::Optimizer& optimizer() { return *optimizer_; }

 private:
  Training(std::shared_ptr<Module> module, double clip) : model(std::move(module)), clip_(clip) {}

  // Units of about bucket_mb, so that there are several.
  template <class Optimizer, class Defaults>
  static void make_fsdp(Training& training, const std::string& strategy, const Group& group, const Defaults& defaults,
                        const TrainingOptions& options) {
    const std::map<std::string, ShardingStrategy> kinds{{"fsdp", ShardingStrategy::full_shard},
                                                        {"fsdp_grad_op", ShardingStrategy::shard_grad_op},
                                                        {"fsdp_no_shard", ShardingStrategy::no_shard},
                                                        {"fsdp_hybrid", ShardingStrategy::hybrid_shard},
                                                        {"fsdp_hybrid_grad_op", ShardingStrategy::hybrid_shard_grad_op}};
    FullyShardedDataParallelOptions fsdp{
        .sharding_strategy = kinds.at(strategy),
        .auto_wrap_policy = wrap_size(static_cast<int64_t>(options.bucket_mb * (1 << 18)) + 1),
        .whole_parameters = !element_wise<Optimizer>,
        .precision = options.precision,
        .reduce_dtype = options.fp32_gradients ? std::optional(at::kFloat) : std::nullopt,
        .communication_hook = options.hook};
    if (strategy.starts_with("fsdp_hybrid")) fsdp.shard_size = group.size() % 2 == 0 ? 2 : 1;
    training.fsdp_ = std::make_shared<FullyShardedDataParallel<Module>>(training.model, group, fsdp);
    training.fsdp_optimizer_ = std::make_shared<FullyShardedOptimizer<Optimizer>>(
        *training.fsdp_, defaults,
        FullyShardedOptimizerOptions{.clip_grad = options.clip, .scaler = options.precision.scaler});
    training.optimizer_ = training.fsdp_optimizer_;
  }

  // As every rank can where it has all gradients; libtorch's own adds up in float32.
  void clip_whole() {
    std::vector<at::Tensor> gradients;
    for (const auto& parameter : distinct(model->parameters())) {
      if (parameter.grad().defined()) gradients.push_back(parameter.grad());
    }
    clip_to_norm(gradients, local_norm(gradients, 2), clip_);
  }

  template <class Act>
  decltype(auto) with_wrapper(const Act& act) {
    if (megatron_) return act(*megatron_);
    if (fsdp_) return act(*fsdp_);
    return sharded_ ? act(*sharded_) : act(*ddp_);
  }

  double clip_;
  std::shared_ptr<torch::optim::Optimizer> optimizer_;
  std::shared_ptr<DistributedOptimizerCore> megatron_;
  std::shared_ptr<OSSCore> oss_;
  std::shared_ptr<DistributedDataParallel<Module>> ddp_;
  std::shared_ptr<FullyShardedDataParallel<Module>> fsdp_;
  std::shared_ptr<FullyShardedOptimizerCore> fsdp_optimizer_;
  std::shared_ptr<ShardedDataParallel<Module>> sharded_;
};

}  // namespace shoal::test
