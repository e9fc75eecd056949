#pragma once
// Trainings of the elastic tests: optimizers of a small net, and their wrappers.

#include <c10/util/ScopeExit.h>
#include <fmt/format.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/utils/clip_grad.h>
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

#include "elastic/access.h"
#include "engine/elastic/guarded_update.h"
#include "optim/state.h"
#include "shoal/ddp.h"
#include "shoal/elastic.h"
#include "shoal/fsdp.h"
#include "shoal/hooks.h"
#include "shoal/megatron.h"
#include "shoal/optim.h"
#include "shoal/optimizer_state.h"
#include "shoal/shard_gossip.h"
#include "shoal/wrap_policy.h"
#include "shoal/zero.h"
#include "tests/elastic/elastic_net.h"

namespace shoal::test {

constexpr uint64_t seed_of_ranks = 100;
constexpr double learning_rate = 0.01;

// hybrid, by_host: with all shards on each host.
enum class Sharding {
  none,
  zero1,
  zero2,
  megatron,
  fsdp,
  hybrid,
  zero1_by_host,
  zero2_by_host,
  megatron_by_host,
  gossip,  // shards on each host, whose parameters are of its own
};

// What is trained, and how.
struct Trained {
  Sharding sharding = Sharding::none;
  std::string optimizer = "adam";
  int64_t width = 24;  // of the net; 258: a matrix is updated in two chunks
  at::ScalarType dtype =
      at::kFloat;             // of the parameters; of 16 bits: with float32 copies, and a loss scaler for float16
  bool overlap = true;        // gradients are reduced in backward; false: with megatron, in step()
  int64_t micro_batches = 1;  // of a step
  double clip = 0;            // norm to which the optimizer's option clips
  bool hooked = false;        // gradients go through a communication hook
  bool in_groups = false;     // OSS has two param groups

  // The dtype of the module that the strategy is given.
  at::ScalarType module_dtype() const { return is_fsdp() ? at::kFloat : dtype; }
  bool is_fsdp() const {
    return sharding == Sharding::fsdp || sharding == Sharding::hybrid || sharding == Sharding::gossip;
  }
  // Whether gradients are summed on each host first. equal_hosts: with equally many ranks; others DDP and FSDP take in
  // their order.
  bool sums_by_host(bool equal_hosts) const {
    return sharding == Sharding::hybrid || sharding == Sharding::zero2_by_host ||
           sharding == Sharding::megatron_by_host ||
           ((sharding == Sharding::zero1_by_host || sharding == Sharding::zero1 || sharding == Sharding::zero2 ||
             sharding == Sharding::fsdp || sharding == Sharding::megatron) &&
            equal_hosts);
  }
  bool is_megatron() const { return sharding == Sharding::megatron || sharding == Sharding::megatron_by_host; }
  bool is_zero2() const { return sharding == Sharding::zero2 || sharding == Sharding::zero2_by_host; }
  bool oss_by_host() const { return sharding == Sharding::zero1_by_host || sharding == Sharding::zero2_by_host; }
  bool has_copies() const { return c10::elementSize(dtype) < 4; }
  GradScalerOptions scaler() const { return {.initial_scale = 65536, .growth_interval = 3}; }  // some steps overflow
};

// For names of tests.
inline std::string short_name(Sharding sharding) {
  const char* names[] = {"ddp",    "zero1",         "zero2",         "megatron",         "fsdp",
                         "hybrid", "zero1_by_host", "zero2_by_host", "megatron_by_host", "gossip"};
  return names[static_cast<int>(sharding)];
}

// One of the strategies that keep a global batch, and over what ranks talk.
struct Strategy {
  Sharding sharding = Sharding::none;
  std::string transport = "auto";

  WorldOptions options() const {
    WorldOptions chosen;
    chosen.transport = transport;
    return chosen;
  }
  std::string name() const { return short_name(sharding) + (transport == "auto" ? "" : "_over_" + transport); }
};

// Over sockets with second owners.
inline const std::vector<Strategy> strategies_with_shares{
    {Sharding::none},         {Sharding::zero1},       {Sharding::zero2},
    {Sharding::megatron},     {Sharding::fsdp},        {Sharding::zero1, "tcp"},
    {Sharding::zero2, "tcp"}, {Sharding::fsdp, "tcp"}, {Sharding::megatron, "tcp"}};

inline std::string name_of(const Trained& trained) {
  const char* names[] = {"DDP",         "ZeRO-1",         "ZeRO-2",         "Megatron",         "FSDP",
                         "hybrid FSDP", "ZeRO-1 by host", "ZeRO-2 by host", "Megatron by host", "gossip of hosts"};
  return fmt::format("{} with {}, width {}, {}", names[static_cast<int>(trained.sharding)], trained.optimizer,
                     trained.width, c10::toString(trained.dtype));
}

// All sharded strategies, with micro-batches, main copies, a loss scaler and clipping among them.
inline const std::vector<Trained> sharded = {
    {Sharding::zero1, "adamw"},
    {Sharding::zero2, "adamw"},
    {Sharding::zero2, "sgd"},
    {.sharding = Sharding::megatron, .optimizer = "adamw", .micro_batches = 2},
    {.sharding = Sharding::megatron, .optimizer = "adamw", .dtype = at::kBFloat16, .clip = 0.3},
    {.sharding = Sharding::megatron, .optimizer = "sgd", .dtype = at::kHalf, .overlap = false},
    {.sharding = Sharding::fsdp, .optimizer = "sgd", .micro_batches = 2},
    {.sharding = Sharding::fsdp, .optimizer = "adamw", .dtype = at::kBFloat16, .clip = 0.3}};

// Calls `act` with a pointer to the optimizer's class and its options.
template <class Act>
auto with_optimizer(const Trained& trained, const Act& act) {
  using namespace torch::optim;
  if (trained.optimizer == "adamw") return act(static_cast<AdamW*>(nullptr), AdamWOptions(learning_rate));
  if (trained.optimizer == "sgd") return act(static_cast<SGD*>(nullptr), SGDOptions(learning_rate).momentum(0.9));
  if (trained.optimizer == "lamb") return act(static_cast<Lamb*>(nullptr), LambOptions(learning_rate));
  return act(static_cast<Adam*>(nullptr), AdamOptions(learning_rate));
}

// Called at each step of a local optimizer, which is a chunk of an update: before and after it. Empty: nothing.
inline std::function<void(torch::optim::Optimizer& local, bool after)> at_chunk;

// Called when one is made, as in each division of shards: with second owners before they get their values.
inline std::function<void()> at_making;
struct Making {
  Making() {
    if (at_making) at_making();
  }
};

template <class Local>
class Chunked : public Local {
 public:
  using Local::Local;
  at::Tensor step(torch::optim::Optimizer::LossClosure closure = nullptr) override {
    if (at_chunk) at_chunk(*this, false);
    auto loss = Local::step(std::move(closure));
    if (at_chunk) at_chunk(*this, true);
    return loss;
  }

 private:
  Making making_{};
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

// An optimizer, and its wrapper, if there is one.
struct Wrapped {
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  std::unique_ptr<DataParallelCore> parallel{};
  std::function<at::Tensor(const at::Tensor&)> forward{};

  OSSCore* oss() const { return dynamic_cast<OSSCore*>(optimizer.get()); }
  DistributedOptimizerCore* megatron() const { return dynamic_cast<DistributedOptimizerCore*>(optimizer.get()); }
  // That of a strategy whose ranks own ranges.
  ShardedOptimizerCore* by_range() const { return dynamic_cast<ShardedOptimizerCore*>(optimizer.get()); }
  // Whether a rank updates what another one owns, too, all at once.
  bool has_second_owners() const {
    const auto* sharded = dynamic_cast<const ShardedOptimizerBase*>(optimizer.get());
    return sharded != nullptr && ElasticAccess::has_second_owners(*sharded);
  }
  const torch::optim::Optimizer* share() const {
    const auto* sharded = dynamic_cast<const ShardedOptimizerBase*>(optimizer.get());
    return sharded != nullptr ? &sharded->local_optimizer() : nullptr;
  }
  void step() const {
    if (oss() != nullptr) {
      oss()->step();
    } else if (by_range() != nullptr) {
      by_range()->step();
    } else {
      optimizer->step();
    }
  }
  void backward(const at::Tensor& loss) const {
    (by_range() != nullptr ? by_range()->scale_loss(loss) : loss).backward();
  }
  void weighted_backward(const at::Tensor& sum, double weight) const {
    parallel ? parallel->backward(sum, weight) : megatron()->backward(sum, weight);
  }
  // Megatron's optimizer has an option for it.
  void clip(const torch::nn::Module& module, double norm) const {
    if (oss() != nullptr) {
      oss()->clip_grad_norm(norm);
    } else if (auto* fsdp = dynamic_cast<FullyShardedCore*>(parallel.get())) {
      fsdp->clip_grad_norm_(norm);
    } else if (parallel) {
      torch::nn::utils::clip_grad_norm_(module.parameters(), norm);
    }
  }
  // Of all ranks; collective if it is sharded.
  OptimizerState state(const torch::nn::Module& module) const {
    if (oss() != nullptr) return oss()->state_dict(module);
    return by_range() != nullptr ? by_range()->state_dict() : optimizer_state(*optimizer, module);
  }
  // The arguments are those of Elastic beside what is trained.
  template <class... Arguments>
  std::unique_ptr<Elastic> elastic(const World& world, Arguments&&... arguments) const {
    if (parallel) return std::make_unique<Elastic>(world, *parallel, *optimizer, std::forward<Arguments>(arguments)...);
    return std::make_unique<Elastic>(world, *megatron(), std::forward<Arguments>(arguments)...);
  }
  NoSync no_sync(bool accumulate) const {
    return parallel ? parallel->no_sync(accumulate) : megatron()->no_sync(accumulate);
  }
};

// Several buckets, and sums in float32.
inline DistributedOptimizerOptions megatron_options(const Trained& trained) {
  DistributedOptimizerOptions options;
  options.bucket_size = 256;
  options.shard_within_host = trained.sharding == Sharding::megatron_by_host;
  options.overlap_grad_reduce = trained.overlap;
  options.overlap_param_gather = !trained.overlap;
  options.grad_reduce_in_fp32 = trained.has_copies();
  options.clip_grad = trained.clip;
  if (trained.dtype == at::kHalf) options.scaler = trained.scaler();
  if (trained.hooked) options.communication_hook = std::make_shared<SumHook>();
  return options;
}

// A unit per layer, and sums in float32.
template <class Local>
FullyShardedDataParallelOptions fsdp_options(const Trained& trained) {
  FullyShardedDataParallelOptions options;
  options.auto_wrap_policy = wrap_type<torch::nn::LinearImpl>();
  options.shard_by_parameter = !element_wise<Local>;
  const bool hybrid = trained.sharding == Sharding::hybrid;
  if (hybrid) options.sharding_strategy = ShardingStrategy::hybrid_shard;
  if (trained.hooked) options.communication_hook = std::make_shared<SumHook>();
  if (!trained.has_copies()) return options;
  options.sharding_strategy = hybrid ? ShardingStrategy::hybrid_shard_grad_op : ShardingStrategy::shard_grad_op;
  options.buffer_dtype = at::kHalf;  // the net has none of floating point
  options.param_dtype = trained.dtype;
  options.reduce_dtype = at::kFloat;
  return options;
}

template <class Options>
std::vector<torch::optim::OptimizerParamGroup> param_groups(const Trained& trained, std::vector<at::Tensor> parameters,
                                                            Options options) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  if (trained.in_groups) {
    groups.emplace_back(std::vector<at::Tensor>{parameters.back()}, std::make_unique<Options>(options));
    groups.back().options().set_lr(learning_rate / 2);
    parameters.pop_back();
  }
  groups.emplace_back(std::move(parameters), std::make_unique<Options>(options));
  return groups;
}

template <class Module>
Wrapped wrap_as(const Trained& trained, const std::shared_ptr<Module>& net, const Group& group) {
  return with_optimizer(trained, [&]<class Local>(Local*, const auto& options) {
    Wrapped wrapped;
    const auto dtype = net->parameters().front().scalar_type();
    const auto keep = [&](auto parallel) {
      wrapped.forward = [to = parallel.get(), dtype](const at::Tensor& x) { return to->forward(x.to(dtype)); };
      wrapped.parallel = std::move(parallel);
    };
    if (trained.is_megatron()) {
      wrapped.optimizer =
          std::make_unique<DistributedOptimizer<Chunked<Local>>>(net, options, group, megatron_options(trained));
      wrapped.forward = [net, trained](const at::Tensor& x) { return net->forward(x.to(trained.dtype)); };
      return wrapped;
    }
    if (trained.sharding == Sharding::gossip) {
      const auto hosts = host_groups(group);
      auto parallel =
          std::make_unique<FullyShardedDataParallel<Module>>(net, hosts.inside, fsdp_options<Chunked<Local>>(trained));
      FullyShardedOptimizerOptions chosen{.clip_grad = trained.clip};
      if (trained.dtype == at::kHalf) chosen.scaler = trained.scaler();
      wrapped.optimizer = std::make_unique<ShardGossipOptimizer<Chunked<Local>>>(
          *parallel, options, hosts.across, ShardGossipOptions{.bucket_cap_mb = 1e-3}, chosen);
      keep(std::move(parallel));
      return wrapped;
    }
    if (trained.is_fsdp()) {
      auto parallel =
          std::make_unique<FullyShardedDataParallel<Module>>(net, group, fsdp_options<Chunked<Local>>(trained));
      FullyShardedOptimizerOptions chosen{.clip_grad = trained.clip};
      if (trained.dtype == at::kHalf) chosen.scaler = trained.scaler();
      wrapped.optimizer = std::make_unique<FullyShardedOptimizer<Chunked<Local>>>(*parallel, options, chosen);
      keep(std::move(parallel));
      return wrapped;
    }
    if (trained.sharding == Sharding::none) {
      wrapped.optimizer = std::make_unique<Local>(net->parameters(), options);
    } else {
      wrapped.optimizer = std::make_unique<OSS<Chunked<Local>>>(
          param_groups(trained, net->parameters(), options), options, trained.oss_by_host() ? group.by_host() : group);
    }
    if (trained.is_zero2()) {
      ShardedDataParallelOptions small;
      small.reduce_buffer_size = 256;  // several buckets
      small.log_sizes = false;
      small.reduce_fp16 = trained.hooked;
      small.grad_reduce_in_fp32 = trained.has_copies();
      keep(std::make_unique<ShardedDataParallel<Module>>(net, *wrapped.oss(), group, small));
    } else {
      DistributedDataParallelOptions small;
      small.first_bucket_mb = 1e-3;
      small.bucket_cap_mb = 1e-3;
      small.grad_reduce_in_fp32 = trained.has_copies();
      keep(std::make_unique<DistributedDataParallel<Module>>(net, group, small));
    }
    return wrapped;
  });
}

// The loss of some samples, which two forwards make. between: called between them.
inline double evaluate(const Wrapped& wrapped, Net& net, const std::function<void()>& between) {
  const torch::NoGradGuard no_grad;
  net.eval();
  const auto training = c10::make_scope_exit([&] { net.train(); });
  const auto x = inputs_of({1, 2, 3});
  wrapped.forward(x);
  between();
  return loss_of(wrapped.forward(x), x).item<double>();
}

// Number of chunks that a rank updates.
inline int64_t chunks_of(const torch::optim::Optimizer& share, bool cut) {
  constexpr int64_t chunk = GuardedUpdate::chunk_numel;
  int64_t chunks = 0;
  for (const auto& group : share.param_groups()) {
    for (const auto& values : group.params()) chunks += cut ? (values.numel() + chunk - 1) / chunk : 1;
  }
  return chunks;
}

}  // namespace shoal::test
