#include "cli/strategies.h"

#include <algorithm>
#include <map>

#include "cli/decentralized.h"
#include "cli/optimizers.h"
#include "engine/gradient_norm.h"
#include "shoal/base/error.h"
#include "shoal/strategy/ddp.h"
#include "shoal/strategy/fsdp.h"
#include "shoal/strategy/local_updates.h"
#include "shoal/strategy/megatron/distributed_optimizer.h"
#include "shoal/strategy/shard_gossip.h"
#include "shoal/strategy/zero/sharded_ddp.h"

namespace shoal::cli {
namespace {

std::unique_ptr<OSSCore> make_oss(const TrainOptions& options, const models::Model& model, const Group& group) {
  auto kind = optimizer_kind(options);
  return std::make_unique<OSSCore>(kind.groups(model), std::move(kind.defaults), kind.make, group, OSSOptions());
}

// Every rank updates everything: alone, or with DistributedDataParallel's gradients.
class Replicated : public Strategy {
 public:
  Replicated(const TrainOptions& options, const std::shared_ptr<models::Model>& model) : Strategy(options, model) {
    const auto kind = optimizer_kind(options);
    optimizer_ = kind.make(kind.groups(*model));
  }

  at::Tensor forward(const at::Tensor& input) override {
    const Precision::Scope scope(options_.precision(), at::kCPU);
    return model_->forward(input);
  }
  void backward(const at::Tensor& loss, bool) override { scaled(loss).backward(); }
  // Where every rank has the same gradients, all of them find the same.
  void step() override {
    const bool found = scaler_ && scaler_->unscale(gradients());
    if (scaler_) scaler_->update(found);
    if (!found && options_.clip > 0) clip_to_norm(gradients(), local_norm(gradients(), 2), options_.clip);
    update(!found);
  }
  void zero_grad() override { optimizer_->zero_grad(); }
  torch::optim::Optimizer& optimizer() override { return *optimizer_; }
  std::vector<const torch::optim::Optimizer*> local_optimizers() const override { return {optimizer_.get()}; }
  std::optional<TrainingState> training_state(const Group& group) override {
    if (options_.strategy == "local") return std::nullopt;
    return scaled(TrainingState(model_, *optimizer_, group));
  }

 protected:
  // With gradients that are finite, or not.
  virtual void update(bool finite) {
    if (finite) optimizer_->step();
  }

  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

class Ddp : public Replicated {
 public:
  Ddp(const TrainOptions& options, const std::shared_ptr<models::Model>& model, const Group& group)
      : Replicated(options, model), parallel_(model, group, options.ddp) {}

  at::Tensor forward(const at::Tensor& input) override { return parallel_.forward(input); }
  void backward(const at::Tensor& loss, bool last) override {
    const auto scope = parallel_.no_sync(!last);
    scaled(loss).backward();
  }
  std::optional<TrainingState> training_state(const Group&) override {
    return scaled(TrainingState(parallel_, *optimizer_));
  }

 private:
  DistributedDataParallel<models::Model> parallel_;
};

// local_sgd, slowmo, diloco. What is evaluated and saved is the mean of the ranks' parameters.
class WithLocalUpdates : public Replicated {
 public:
  WithLocalUpdates(const TrainOptions& options, const std::shared_ptr<models::Model>& model, const Group& group)
      : Replicated(options, model), local_(model, *optimizer_, group, options.local_updates) {}

  void zero_grad() override { local_.zero_grad(); }
  std::shared_ptr<void> whole_parameters() override {
    return std::make_shared<MeanParameters>(local_.mean_parameters());
  }
  std::optional<TrainingState> training_state(const Group&) override { return scaled(TrainingState(local_)); }

 private:
  void update(bool finite) override { local_.step(finite); }

  LocalUpdates local_;
};

// A wrapper over an OSS.
template <class Wrapper>
class Zero : public Strategy {
 public:
  template <class Make>
  Zero(const TrainOptions& options, const std::shared_ptr<models::Model>& model, const Group& group, const Make& make)
      : Strategy(options, model), optimizer_(make_oss(options, *model, group)), parallel_(make(*optimizer_)) {}

  at::Tensor forward(const at::Tensor& input) override { return parallel_->forward(input); }
  void backward(const at::Tensor& loss, bool last) override {
    const auto scope = parallel_->no_sync(!last);
    scaled(loss).backward();
  }
  void step() override {
    if (scaler_) {
      optimizer_->step(*scaler_, options_.clip);
      return;
    }
    if (options_.clip > 0) optimizer_->clip_grad_norm(options_.clip);
    optimizer_->step();
  }
  void zero_grad() override { optimizer_->zero_grad(); }
  torch::optim::Optimizer& optimizer() override { return *optimizer_; }
  std::vector<const torch::optim::Optimizer*> local_optimizers() const override {
    return {&optimizer_->local_optimizer()};
  }
  std::optional<TrainingState> training_state(const Group&) override {
    return scaled(TrainingState(*parallel_, *optimizer_));
  }

 private:
  std::unique_ptr<OSSCore> optimizer_;
  std::unique_ptr<Wrapper> parallel_;
};

class Megatron : public Strategy {
 public:
  Megatron(const TrainOptions& options, const std::shared_ptr<models::Model>& model, const Group& group)
      : Strategy(options, model) {
    auto kind = optimizer_kind(options);
    optimizer_ = std::make_unique<DistributedOptimizerCore>(DistributedOptimizerCore::Modules{model},
                                                            kind.groups(*model), std::move(kind.defaults), kind.make,
                                                            kind.element_wise, group, options.megatron);
  }

  at::Tensor forward(const at::Tensor& input) override { return model_->forward(input); }
  void backward(const at::Tensor& loss, bool last) override {
    const auto scope = optimizer_->no_sync(!last);
    optimizer_->scale_loss(loss).backward();
  }
  void step() override { optimizer_->step(); }
  void zero_grad() override { optimizer_->zero_grad(); }
  std::vector<at::Tensor> gradients() const override {
    std::vector<at::Tensor> list;
    for (const auto& parameter : model_->parameters()) list.push_back(optimizer_->main_grad(parameter));
    std::erase_if(list, [](const at::Tensor& tensor) { return !tensor.defined(); });
    return list;
  }
  torch::optim::Optimizer& optimizer() override { return *optimizer_; }
  std::vector<const torch::optim::Optimizer*> local_optimizers() const override {
    return {&optimizer_->local_optimizer()};
  }
  std::optional<TrainingState> training_state(const Group&) override { return TrainingState(*optimizer_); }

 private:
  std::unique_ptr<DistributedOptimizerCore> optimizer_;
};

class Fsdp : public Strategy {
 public:
  using MakeOptimizer = std::function<std::unique_ptr<FullyShardedOptimizerCore>(
      FullyShardedCore& parallel, std::vector<torch::optim::OptimizerParamGroup> groups, OptimizerKind kind,
      const FullyShardedOptimizerOptions& options)>;

  Fsdp(const TrainOptions& options, const std::shared_ptr<models::Model>& model, const Group& group,
       ShardingStrategy sharding, const MakeOptimizer& make = make_optimizer)
      : Strategy(options, model) {
    auto kind = optimizer_kind(options);
    auto groups = kind.groups(*model);
    const bool mixed = options.dtype.ends_with("_mixed");
    parallel_ = std::make_unique<FullyShardedDataParallel<models::Model>>(
        model, group,
        FullyShardedDataParallelOptions{.sharding_strategy = sharding,
                                        .auto_wrap_policy = unit_policy(options.model),
                                        .whole_parameters = !kind.element_wise,
                                        .precision = options.precision(),
                                        .reduce_dtype = mixed ? std::optional(at::kFloat) : std::nullopt,
                                        .communication_hook = options.ddp.communication_hook});
    optimizer_ = make(parallel_->core(), std::move(groups), std::move(kind),
                      {.clip_grad = options.clip, .scaler = options.precision().scaler});
  }

  at::Tensor forward(const at::Tensor& input) override { return parallel_->forward(input); }
  void backward(const at::Tensor& loss, bool last) override {
    const auto scope = parallel_->no_sync(!last);
    optimizer_->scale_loss(loss).backward();
  }
  void step() override { optimizer_->step(); }
  void zero_grad() override { optimizer_->zero_grad(); }
  std::shared_ptr<void> whole_parameters() override {
    return std::make_shared<FullParameters>(parallel_->summon_full_params(/*writeback=*/false));
  }
  bool has_whole_model() const override { return parallel_->shared(); }
  std::vector<at::Tensor> parameters() const override {
    return parallel_->shared() ? model_->parameters() : parallel_->core().own_parameters();
  }
  std::vector<at::Tensor> gradients() const override { return parallel_->core().own_gradients(); }
  torch::optim::Optimizer& optimizer() override { return *optimizer_; }
  std::vector<const torch::optim::Optimizer*> local_optimizers() const override {
    return {&optimizer_->local_optimizer()};
  }
  std::optional<TrainingState> training_state(const Group&) override { return TrainingState(*parallel_, *optimizer_); }

 private:
  static std::unique_ptr<FullyShardedOptimizerCore> make_optimizer(
      FullyShardedCore& parallel, std::vector<torch::optim::OptimizerParamGroup> groups, OptimizerKind kind,
      const FullyShardedOptimizerOptions& options) {
    return std::make_unique<FullyShardedOptimizerCore>(parallel, std::move(groups), std::move(kind.defaults), kind.make,
                                                       kind.element_wise, options);
  }

 protected:
  std::unique_ptr<FullyShardedDataParallel<models::Model>> parallel_;
  std::unique_ptr<FullyShardedOptimizerCore> optimizer_;
};

// FSDP on every host, gossip of shards between hosts. What is evaluated and saved is the mean of the hosts' models,
// from which training goes on.
class HybridGossip : public Fsdp {
 public:
  HybridGossip(const TrainOptions& options, const std::shared_ptr<models::Model>& model, const Group& group,
               const HostGroups& hosts)
      : Fsdp(options, model, hosts.inside, ShardingStrategy::full_shard, averaging_with(options, hosts.across)),
        group_(group),
        inside_(hosts.inside) {}

  std::shared_ptr<void> whole_parameters() override {
    gossip().global_avg();
    return Fsdp::whole_parameters();
  }
  bool has_whole_model() const override { return false; }
  std::optional<Group> bound() const override { return inside_; }
  std::optional<Group> present() const override {
    const auto& gone = gossip().statistics().removed;
    if (gone.empty()) return group_;
    if (present_ && hosts_gone_ == gone.size()) return present_;
    std::vector<int> ranks;
    for (int rank = 0; rank < group_.size(); ++rank) {
      if (std::count(gone.begin(), gone.end(), rank / inside_.size()) == 0) ranks.push_back(rank);
    }
    hosts_gone_ = gone.size();
    return present_ = group_.subgroup(ranks);
  }
  std::optional<TrainingState> training_state(const Group& group) override {
    return TrainingState(*parallel_, gossip(), group);
  }
  std::string note() const override { return missed_exchanges(gossip().statistics()); }
  std::vector<std::pair<std::string, double>> figures() override {
    return exchange_figures(gossip().statistics(), gossip().consensus_distance());
  }

 private:
  static MakeOptimizer averaging_with(const TrainOptions& options, const Group& across) {
    ShardGossipOptions gossip{.topology = topology_of(options, across.size(), /*local_size=*/1),
                              .neighbour_timeout_seconds = options.neighbour_timeout,
                              .bucket_cap_mb = options.ddp.bucket_cap_mb};
    if (options.exchange_dtype == "bf16") gossip.exchange_dtype = at::kBFloat16;
    return [across, gossip](FullyShardedCore& parallel, std::vector<torch::optim::OptimizerParamGroup> groups,
                            OptimizerKind kind, const FullyShardedOptimizerOptions& chosen) {
      return std::make_unique<ShardGossipOptimizerCore>(parallel, across, std::move(groups), std::move(kind.defaults),
                                                        kind.make, kind.element_wise, chosen, gossip);
    };
  }
  ShardGossipOptimizerCore& gossip() const { return static_cast<ShardGossipOptimizerCore&>(*optimizer_); }

  Group group_;
  Group inside_;
  mutable std::optional<Group> present_;  // when so many hosts have gone
  mutable size_t hosts_gone_ = 0;
};

// As many ranks as share a model; where nothing is said, those of each host.
HostGroups hosts_of(const TrainOptions& options, const Group& group) {
  const auto size = options.topology_local_size;
  return host_groups(group, size > 1 ? std::optional<int>(size) : std::nullopt);
}

const std::map<std::string, ShardingStrategy> sharding_strategies{{"fsdp", ShardingStrategy::full_shard},
                                                                  {"fsdp_grad_op", ShardingStrategy::shard_grad_op},
                                                                  {"hybrid", ShardingStrategy::hybrid_shard}};

}  // namespace

WrapPolicy unit_policy(const std::string& model) {
  return wrap_if([gpt = model == "gpt"](const std::string& name, const torch::nn::Module&) {
    const auto depth = std::count(name.begin(), name.end(), '.');
    return gpt ? depth == 1 && name.starts_with("blocks.") : depth == 0;
  });
}

Strategy::Strategy(const TrainOptions& options, std::shared_ptr<models::Model> model)
    : options_(options), model_(std::move(model)) {
  if (const auto scaler = options.precision().scaler) scaler_.emplace(*scaler);
}

at::Tensor Strategy::scaled(const at::Tensor& loss) const {
  return scaler_ ? scaler_->scale(loss) : loss;
}

std::optional<TrainingState> Strategy::scaled(TrainingState training) {
  if (scaler_) training.with(*scaler_);
  return training;
}

std::vector<at::Tensor> Strategy::gradients() const {
  std::vector<at::Tensor> list;
  for (const auto& parameter : model_->parameters()) {
    if (parameter.grad().defined()) list.push_back(parameter.grad());
  }
  return list;
}

std::vector<std::string> strategy_names() {
  return {"ddp",       "zero1",  "zero2",  "megatron",      "fsdp",          "fsdp_grad_op", "hybrid",
          "local_sgd", "slowmo", "diloco", "decentralized", "hybrid_gossip", "none",         "local"};
}

std::unique_ptr<Strategy> make_strategy(const TrainOptions& options, const std::shared_ptr<models::Model>& model,
                                        const Group& group, int64_t total_steps) {
  if (options.strategy == "ddp") return std::make_unique<Ddp>(options, model, group);
  if (options.strategy == "zero1") {
    using Wrapper = DistributedDataParallel<models::Model>;
    return std::make_unique<Zero<Wrapper>>(
        options, model, group, [&](OSSCore&) { return std::make_unique<Wrapper>(model, group, options.ddp); });
  }
  if (options.strategy == "zero2") {
    using Wrapper = ShardedDataParallel<models::Model>;
    return std::make_unique<Zero<Wrapper>>(options, model, group, [&](OSSCore& optimizer) {
      return std::make_unique<Wrapper>(model, optimizer, group, options.zero2);
    });
  }
  if (options.strategy == "decentralized") return make_decentralized(options, model, group, total_steps);
  if (options.strategy == "hybrid_gossip") {
    return std::make_unique<HybridGossip>(options, model, group, hosts_of(options, group));
  }
  if (options.strategy == "megatron") return std::make_unique<Megatron>(options, model, group);
  if (const auto sharding = sharding_strategies.find(options.strategy); sharding != sharding_strategies.end()) {
    return std::make_unique<Fsdp>(options, model, group, sharding->second);
  }
  if (options.takes_local_updates()) return std::make_unique<WithLocalUpdates>(options, model, group);
  return std::make_unique<Replicated>(options, model);
}

}  // namespace shoal::cli
