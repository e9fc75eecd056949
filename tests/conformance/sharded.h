#pragma once
// Strategies that shard the optimizer's state, gradients or parameters over ranks.

#include "shoal/checkpoint.h"
#include "shoal/ddp.h"
#include "shoal/fsdp.h"
#include "shoal/megatron.h"
#include "shoal/shard_gossip.h"
#include "shoal/zero.h"
#include "tests/conformance/wrap.h"

namespace shoal::test {

// Small enough for several buckets, or units, of a small model.
inline constexpr int64_t bucket_elements = 30;

// OSS under any wrapper.
template <class Self, class Module>
class WithOSS : public Callable<Self, Module> {
 public:
  WithOSS(std::shared_ptr<Module> model, const Setup& setup, const Group& group)
      : model_(std::move(model)), setup_(setup) {
    if (setup.scaler) {
      model_->to(at::kFloat);
      scaler_.emplace(*setup.scaler);
      precision_.compute = at::kHalf;
    }
    if (setup.optimizer_of != nullptr) {
      optimizer_ = std::dynamic_pointer_cast<OSSCore>(setup.optimizer_of->shared_optimizer());
      return;
    }
    optimizer_ = with_optimizer(setup_, [&](const auto& defaults, auto of) -> std::unique_ptr<OSSCore> {
      return std::make_unique<OSS<typename decltype(of)::type>>(groups_of(setup, *model_), defaults, group);
    });
  }

  torch::optim::Optimizer& optimizer() override { return *optimizer_; }
  std::shared_ptr<torch::optim::Optimizer> shared_optimizer() override { return optimizer_; }
  void zero_grad() override { optimizer_->zero_grad(); }
  bool step() override {
    if (scaler_) return optimizer_->step(*scaler_, setup_.clip);
    if (setup_.clip > 0) clip(setup_.clip);
    optimizer_->step();
    return true;
  }
  double clip(double max_norm) override { return optimizer_->clip_grad_norm(max_norm); }
  at::Tensor scale(const at::Tensor& loss) override { return scaler_ ? scaler_->scale(loss) : loss; }
  double loss_scale() override { return scaler_ ? scaler_->value() : 1; }
  OptimizerState optimizer_state() override { return optimizer_->state_dict(*model_); }
  void load_optimizer_state(const OptimizerState& state) override { optimizer_->load_state_dict(*model_, state); }

 protected:
  std::unique_ptr<TrainingState> scaled(std::unique_ptr<TrainingState> state) {
    if (scaler_) state->with(*scaler_);
    return state;
  }

  std::shared_ptr<Module> model_;
  Setup setup_;
  Precision precision_;
  std::optional<GradScaler> scaler_;
  std::shared_ptr<OSSCore> optimizer_;
};

template <class Module>
class Zero1 : public WithOSS<Zero1<Module>, Module> {
 public:
  Zero1(std::shared_ptr<Module> model, const Setup& setup, const Group& group)
      : WithOSS<Zero1<Module>, Module>(std::move(model), setup, group),
        parallel_(this->model_, group,
                  {.find_unused_parameters = setup.find_unused_parameters,
                   .static_graph = setup.static_graph,
                   .ignored = setup.ignored,
                   .precision = this->precision_,
                   .bucket_cap_mb = 1e-4,
                   .first_bucket_mb = 1e-4}) {}
  template <class... Arguments>
  auto call(Arguments&&... arguments) {
    return parallel_.forward(std::forward<Arguments>(arguments)...);
  }
  void backward(const at::Tensor& loss_sum, double weight) override { parallel_.backward(loss_sum, weight); }
  Trained::Scope no_sync(bool accumulate) override { return scope(parallel_.no_sync(accumulate)); }
  Joinable& joinable() override { return parallel_; }
  void abandon_step() override { parallel_.abandon_step(); }
  std::unique_ptr<TrainingState> state() override {
    return this->scaled(std::make_unique<TrainingState>(parallel_, *this->optimizer_));
  }

 private:
  DistributedDataParallel<Module> parallel_;
};

template <class Module>
class Zero2 : public WithOSS<Zero2<Module>, Module> {
 public:
  Zero2(std::shared_ptr<Module> model, const Setup& setup, const Group& group)
      : WithOSS<Zero2<Module>, Module>(std::move(model), setup, group),
        parallel_(this->model_, *this->optimizer_, group,
                  {.find_unused_parameters = setup.find_unused_parameters,
                   .ignored = setup.ignored,
                   .precision = this->precision_,
                   .log_sizes = false,
                   .reduce_buffer_size = bucket_elements}) {}
  template <class... Arguments>
  auto call(Arguments&&... arguments) {
    return parallel_.forward(std::forward<Arguments>(arguments)...);
  }
  void backward(const at::Tensor& loss_sum, double weight) override { parallel_.backward(loss_sum, weight); }
  Trained::Scope no_sync(bool accumulate) override { return scope(parallel_.no_sync(accumulate)); }
  Joinable& joinable() override { return parallel_; }
  void abandon_step() override { parallel_.abandon_step(); }
  std::unique_ptr<TrainingState> state() override {
    return this->scaled(std::make_unique<TrainingState>(parallel_, *this->optimizer_));
  }

 private:
  ShardedDataParallel<Module> parallel_;
};

// Base for a ShardedOptimizerCore, which has the scaler.
template <class Self, class Module>
class WithShardedOptimizer : public Callable<Self, Module> {
 public:
  WithShardedOptimizer(std::shared_ptr<Module> model, const Setup& setup) : model_(std::move(model)), setup_(setup) {
    if (setup.scaler) model_->to(at::kFloat);
  }
  torch::optim::Optimizer& optimizer() override { return *sharded_; }
  void zero_grad() override { sharded_->zero_grad(); }
  bool step() override { return sharded_->step().updated; }
  at::Tensor scale(const at::Tensor& loss) override { return sharded_->scale_loss(loss); }
  double loss_scale() override { return sharded_->scaler() != nullptr ? sharded_->scaler()->value() : 1; }
  OptimizerState optimizer_state() override { return sharded_->state_dict(); }
  void load_optimizer_state(const OptimizerState& state) override { sharded_->load_state_dict(state); }

 protected:
  std::shared_ptr<Module> model_;
  Setup setup_;
  ShardedOptimizerCore* sharded_ = nullptr;
};

template <class Module>
class Megatron : public WithShardedOptimizer<Megatron<Module>, Module> {
 public:
  Megatron(std::shared_ptr<Module> model, const Setup& setup, const Group& group, DistributedOptimizerOptions options)
      : WithShardedOptimizer<Megatron<Module>, Module>(std::move(model), setup) {
    options.clip_grad = setup.clip;
    options.scaler = setup.scaler;
    options.ignored = setup.ignored;
    options.bucket_size = bucket_elements;
    if (setup.scaler) this->model_->to(at::kHalf);
    optimizer_ = with_optimizer(setup, [&](const auto& defaults, auto of) -> std::unique_ptr<DistributedOptimizerCore> {
      return std::make_unique<DistributedOptimizer<typename decltype(of)::type>>(
          DistributedOptimizerCore::Modules{this->model_}, setup.groups ? setup.groups() : ParamGroups(), defaults,
          group, options);
    });
    this->sharded_ = optimizer_.get();
  }
  template <class... Arguments>
  auto call(Arguments&&... arguments) {
    return this->model_->forward(cast(std::forward<Arguments>(arguments))...);
  }
  void backward(const at::Tensor& loss_sum, double weight) override { optimizer_->backward(loss_sum, weight); }
  Trained::Scope no_sync(bool accumulate) override { return scope(optimizer_->no_sync(accumulate)); }
  double clip(double) override { throw Lacks("a clip between backward and step: clip_grad of the options"); }
  Joinable& joinable() override { return *optimizer_; }
  void abandon_step() override { optimizer_->abandon_step(); }
  std::unique_ptr<TrainingState> state() override { return std::make_unique<TrainingState>(*optimizer_); }

 private:
  template <class Argument>
  decltype(auto) cast(Argument&& argument) {
    if constexpr (std::is_same_v<std::decay_t<Argument>, at::Tensor>) {
      return this->setup_.scaler && argument.is_floating_point() ? argument.to(at::kHalf) : argument;
    } else {
      return std::forward<Argument>(argument);
    }
  }

  std::unique_ptr<DistributedOptimizerCore> optimizer_;
};

// Common base of FSDP and its variant with gossip.
template <class Self, class Module>
class WithFsdp : public WithShardedOptimizer<Self, Module> {
 public:
  WithFsdp(std::shared_ptr<Module> model, const Setup& setup, const Group& group,
           FullyShardedDataParallelOptions options)
      : WithShardedOptimizer<Self, Module>(std::move(model), setup),
        parallel_(this->model_, group, complete(setup, std::move(options))) {}
  template <class... Arguments>
  auto call(Arguments&&... arguments) {
    return parallel_.forward(std::forward<Arguments>(arguments)...);
  }
  void backward(const at::Tensor& loss_sum, double weight) override { parallel_.backward(loss_sum, weight); }
  Trained::Scope no_sync(bool accumulate) override { return scope(parallel_.no_sync(accumulate)); }
  double clip(double max_norm) override { return parallel_.clip_grad_norm_(max_norm); }
  Joinable& joinable() override { return parallel_; }
  void unwrap() override { parallel_.unwrap(); }
  void abandon_step() override { parallel_.abandon_step(); }

 protected:
  FullyShardedDataParallel<Module> parallel_;

 private:
  static FullyShardedDataParallelOptions complete(const Setup& setup, FullyShardedDataParallelOptions options) {
    options.auto_wrap_policy = wrap_size(bucket_elements);
    options.ignored_parameters = setup.ignored;
    if (setup.scaler) options.param_dtype = at::kHalf;
    return options;
  }
};

template <class Module>
class Fsdp : public WithFsdp<Fsdp<Module>, Module> {
 public:
  Fsdp(std::shared_ptr<Module> model, const Setup& setup, const Group& group, ShardingStrategy kind)
      : WithFsdp<Fsdp<Module>, Module>(
            std::move(model), setup, group,
            {.sharding_strategy = kind,
             .shard_size = kind == ShardingStrategy::hybrid_shard || kind == ShardingStrategy::hybrid_shard_grad_op
                               ? std::optional(ranks_per_host(group))
                               : std::nullopt}) {
    optimizer_ =
        with_optimizer(setup, [&](const auto& defaults, auto of) -> std::unique_ptr<FullyShardedOptimizerCore> {
          return std::make_unique<FullyShardedOptimizer<typename decltype(of)::type>>(
              this->parallel_, setup.groups ? setup.groups() : ParamGroups(), defaults,
              FullyShardedOptimizerOptions{.clip_grad = setup.clip, .scaler = setup.scaler});
        });
    this->sharded_ = optimizer_.get();
  }
  std::unique_ptr<TrainingState> state() override {
    return std::make_unique<TrainingState>(this->parallel_, *optimizer_);
  }

 private:
  std::unique_ptr<FullyShardedOptimizerCore> optimizer_;
};

template <class Module>
class Gossip : public WithFsdp<Gossip<Module>, Module> {
 public:
  Gossip(std::shared_ptr<Module> model, const Setup& setup, const Group& group)
      : Gossip(std::move(model), setup, group, host_groups(group, ranks_per_host(group))) {}
  Gossip(std::shared_ptr<Module> model, const Setup& setup, const Group& group, const HostGroups& hosts)
      : WithFsdp<Gossip<Module>, Module>(std::move(model), setup, hosts.inside, {}), all_(group) {
    if (setup.groups) throw Lacks("param groups of a ShardGossipOptimizer");
    const ShardGossipOptions gossip{.topology = make_topology("complete", hosts.across.size()),
                                    .neighbour_timeout_seconds = 30};
    optimizer_ = with_optimizer(setup, [&](const auto& defaults, auto of) -> std::unique_ptr<ShardGossipOptimizerCore> {
      return std::make_unique<ShardGossipOptimizer<typename decltype(of)::type>>(
          this->parallel_, defaults, hosts.across, gossip,
          FullyShardedOptimizerOptions{.clip_grad = setup.clip, .scaler = setup.scaler});
    });
    this->sharded_ = optimizer_.get();
  }
  std::unique_ptr<TrainingState> state() override {
    return std::make_unique<TrainingState>(this->parallel_, *optimizer_, all_);
  }

 private:
  Group all_;
  std::unique_ptr<ShardGossipOptimizerCore> optimizer_;
};

}  // namespace shoal::test
