#include "cli/strategies/fsdp.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "cli/strategies/decentralized.h"
#include "cli/strategies/optimizers.h"
#include "cli/train/common_values.h"
#include "shoal/error.h"
#include "shoal/fsdp.h"
#include "shoal/shard_gossip.h"

namespace shoal::cli {
namespace {

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
    optimizer_ = make(*parallel_, std::move(groups), std::move(kind),
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
    return parallel_->shared() ? model_->parameters() : parallel_->own_parameters();
  }
  std::vector<at::Tensor> gradients() const override { return parallel_->own_gradients(); }
  torch::optim::Optimizer& optimizer() override { return *optimizer_; }
  std::vector<const torch::optim::Optimizer*> local_optimizers() const override {
    return {&optimizer_->local_optimizer()};
  }
  std::optional<TrainingState> training_state(const Group&) override { return TrainingState(*parallel_, *optimizer_); }
  std::optional<LoggingData> logging_data() const override { return parallel_->logging_data(); }

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

ShardGossipOptions gossip_options(const TrainOptions& options, int hosts) {
  ShardGossipOptions gossip{.topology = topology_of(options, hosts, /*local_size=*/1),
                            .neighbour_timeout_seconds = options.neighbour_timeout,
                            .bucket_cap_mb = options.ddp.bucket_cap_mb};
  if (options.exchange_dtype == "bf16") gossip.exchange_dtype = at::kBFloat16;
  return gossip;
}

// FSDP on every host, gossip of shards between hosts. What is evaluated and saved is the mean of the hosts' models.
class HybridGossip : public Fsdp {
 public:
  HybridGossip(const TrainOptions& options, const std::shared_ptr<models::Model>& model, const Group& group,
               const HostGroups& hosts)
      : Fsdp(options, model, hosts.inside, ShardingStrategy::full_shard, averaging_with(options, hosts.across)),
        group_(group),
        inside_(hosts.inside) {}

  std::shared_ptr<void> whole_parameters() override { return std::make_shared<Mean>(*this); }
  bool has_whole_model() const override { return false; }
  bool in_step() const override { return false; }
  int leader() const override { return first_of_those_left(gossip().statistics()) * inside_.size(); }
  std::optional<Group> bound() const override { return inside_; }
  std::optional<Group> present() const override { return gossip().remaining(group_); }
  std::optional<TrainingState> training_state(const Group& group) override {
    return TrainingState(*parallel_, gossip(), group);
  }
  std::string note() const override { return missed_exchanges(gossip().statistics()); }
  std::vector<std::pair<std::string, double>> figures() override {
    return exchange_figures(gossip().statistics(), gossip().consensus_distance());
  }

 private:
  static MakeOptimizer averaging_with(const TrainOptions& options, const Group& across) {
    return [across, gossip = gossip_options(options, across.size())](
               FullyShardedCore& parallel, std::vector<torch::optim::OptimizerParamGroup> groups, OptimizerKind kind,
               const FullyShardedOptimizerOptions& chosen) {
      return std::make_unique<ShardGossipOptimizerCore>(parallel, across, std::move(groups), std::move(kind.defaults),
                                                        kind.make, kind.element_wise, chosen, gossip);
    };
  }
  // Parameters, and floating-point buffers of all ranks, which FSDP leaves to each.
  class Mean {
   public:
    // The buffers last, and over those that were there at first: when a rank ends in the middle, who has got on further
    // than others meets it there, too, and all begin again.
    explicit Mean(HybridGossip& strategy) : gossip_(strategy.gossip()) {
      const auto present = strategy.present();
      gossip_.hold_mean();
      try {
        on_the_whole_host(strategy.inside_, [&] {
          buffers_ = std::make_unique<CommonValues>(CommonValues::Of::mean, strategy.model_->buffers(), *present);
        });
        whole_ = strategy.Fsdp::whole_parameters();
      } catch (...) {
        buffers_.reset();
        gossip_.hold_own();
        throw;
      }
    }
    ~Mean() {
      try {
        whole_.reset();
        gossip_.hold_own();
      } catch (const Error&) {  // a rank of this host has ended, and with it the host: its next step says so
      }
    }
    Mean(const Mean&) = delete;
    Mean& operator=(const Mean&) = delete;

   private:
    // CommError on all ranks of the host where it is one on any: an operation may be over for one of them already.
    static void on_the_whole_host(const Group& host, const std::function<void()>& work) {
      std::optional<CommError> failure;
      try {
        work();
      } catch (const CommError& error) {
        failure = error;
      }
      auto failed = at::full({1}, failure ? 1 : 0, at::kInt);
      host.all_reduce(failed, ReduceOp::max, {-1, -1, "whether all ranks have answered"}).wait();
      if (failure) throw *failure;
      if (failed.item<int>() == 0) return;
      throw CommError("a rank of another host has ended, as another rank of this host noticed");
    }

    ShardGossipOptimizerCore& gossip_;
    std::unique_ptr<CommonValues> buffers_;
    std::shared_ptr<void> whole_;
  };

  ShardGossipOptimizerCore& gossip() const { return static_cast<ShardGossipOptimizerCore&>(*optimizer_); }

  Group group_;
  Group inside_;
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

void check_hybrid_gossip(const TrainOptions& options, int ranks) {
  const int size = options.topology_local_size;
  if (ranks % size != 0) {
    throw UsageError(fmt::format("--topology-local-size {}: {} ranks do not make hosts of {}", size, ranks, size));
  }
  const int hosts = size > 1 ? ranks / size : 1;
  gossip_options(options, hosts).validate(hosts);
}

std::unique_ptr<Strategy> make_fsdp(const TrainOptions& options, const std::shared_ptr<models::Model>& model,
                                    const Group& group) {
  if (options.strategy == "hybrid_gossip") {
    return std::make_unique<HybridGossip>(options, model, group, hosts_of(options, group));
  }
  const auto sharding = sharding_strategies.find(options.strategy);
  if (sharding == sharding_strategies.end()) return nullptr;
  return std::make_unique<Fsdp>(options, model, group, sharding->second);
}

}  // namespace shoal::cli
