// Strategy hybrid_gossip: FSDP within hosts, gossip of shards between hosts. Evaluates and saves the mean of the hosts'
// models.

#include <fmt/format.h>

#include "comm/agreement/fail_together.h"
#include "shoal/shard_gossip.h"
#include "training/builtin.h"
#include "training/common_values.h"
#include "training/strategies/fsdp.h"
#include "training/topology_options.h"
#include "training/wrapper_options.h"

namespace shoal {
namespace {

ShardGossipOptions gossip_options(const OptionValues& values, const TrainingOptions& options, int hosts) {
  ShardGossipOptions gossip{.topology = topology_of(values, options, hosts, /*local_size=*/1),
                            .neighbour_timeout_seconds = values.number("neighbour_timeout"),
                            .bucket_cap_mb = values.number("bucket_cap_mb")};
  if (values.text("exchange_dtype") == "bf16") gossip.exchange_dtype = at::kBFloat16;
  return gossip;
}

class HybridGossip : public FsdpTraining {
 public:
  HybridGossip(const TrainingParts& parts, const HostGroups& hosts)
      : FsdpTraining(parts, hosts.inside, ShardingStrategy::full_shard, averaging_with(parts, hosts.across)) {}

  std::optional<TrainingState> state() override { return TrainingState(*parallel_, gossip(), group_); }
  std::shared_ptr<void> full_parameters() override {
    auto mean = std::make_shared<Mean>(*this);
    mean_ = mean;
    return mean;
  }
  std::string open_scope() const override { return mean_.expired() ? FsdpTraining::open_scope() : "full_parameters()"; }
  bool has_whole_model() const override { return false; }
  std::optional<Group> lockstep_group() const override { return inside(); }
  std::optional<Group> active_group() override { return gossip().remaining(group_); }
  int first_active_rank() const override { return first_of_those_left(gossip().statistics()) * inside().size(); }
  const ExchangeStatistics* exchanges() const override { return &gossip().statistics(); }
  double consensus_distance() override { return gossip().consensus_distance(); }

 protected:
  std::vector<Group> groups() const override {
    auto list = FsdpTraining::groups();
    list.insert(list.end(), {group_, gossip().across()});
    return list;
  }

 private:
  static MakeOptimizer averaging_with(const TrainingParts& parts, const Group& across) {
    return [parts, across, groups = groups_of_units(parts)](FullyShardedCore& parallel) {
      return std::make_unique<ShardGossipOptimizerCore>(
          parallel, groups, parts.recipe.defaults->clone(), parts.recipe.make, parts.recipe.element_wise, across,
          gossip_options(parts.values, parts.options, across.size()), sharded_optimizer_options(parts));
    };
  }

  // Scope in which parameters, and the floating-point buffers that FSDP leaves to each rank, hold the mean.
  class Mean {
   public:
    // Buffers last, over the ranks that were present at first: if a rank ends meanwhile, ranks that are further ahead
    // fail here, too, and all start over.
    explicit Mean(HybridGossip& training) {
      const auto present = training.active_group();
      mean_.emplace(training.gossip().mean_parameters());
      // An operation may succeed on one rank of the host and fail on another.
      fail_together(training.inside(), {-1, -1, "whether all ranks have answered"},
                    "a rank of another host has ended, as another rank of this host noticed", [&] {
                      buffers_ =
                          std::make_unique<CommonValues>(CommonValues::Of::mean, training.module_->buffers(), *present);
                    });
      whole_ = training.FsdpTraining::full_parameters();
    }

   private:
    std::optional<MeanParameters> mean_;
    std::unique_ptr<CommonValues> buffers_;
    std::shared_ptr<void> whole_;
  };

  ShardGossipOptimizerCore& gossip() const { return static_cast<ShardGossipOptimizerCore&>(*optimizer_); }
  const Group& inside() const { return gossip().group(); }  // the ranks of this host

  std::weak_ptr<Mean> mean_{};  // of full_parameters()
};

// Without a number, the ranks of each host share a model.
std::unique_ptr<TrainingCore> make_hybrid_gossip(const TrainingParts& parts) {
  const auto size = parts.values.count("topology_local_size");
  return std::make_unique<HybridGossip>(parts,
                                        host_groups(parts.group, size > 1 ? std::optional<int>(size) : std::nullopt));
}

void check_hybrid_gossip(const OptionValues& values, const TrainingOptions& options, int ranks,
                         std::optional<int> hosts) {
  check_topology_options(values);
  check_hook_of_parts("hybrid_gossip", values);
  const auto size = values.count("topology_local_size");
  if (ranks % size != 0) {
    throw StrategyOptionError("topology_local_size",
                              fmt::format(" {}: {} ranks do not make hosts of {}", size, ranks, size));
  }
  if (size > 1) hosts = ranks / size;
  if (hosts) gossip_options(values, options, *hosts).validate(*hosts);
}

std::vector<StrategyOption> hybrid_gossip_option_list() {
  auto options = topology_option_list("ranks that share a model (1: those of each host)", {"float32", "bf16"});
  for (auto& option : fsdp_option_list()) options.push_back(std::move(option));
  return options;
}

}  // namespace

std::vector<Strategy> hybrid_gossip_strategies() {
  return {{.name = "hybrid_gossip",
           .help = "fsdp on each host, decentralized between hosts",
           .options = hybrid_gossip_option_list(),
           .synchronization = Synchronization::asynchronous,
           .main_copies = true,
           .logging_data = true,
           .elastic = true,
           .takes_deferred = true,
           .check = check_hybrid_gossip,
           .make = make_hybrid_gossip}};
}

}  // namespace shoal
