// Strategy decentralized.

#include "shoal/decentralized.h"

#include "training/builtin.h"
#include "training/common_values.h"
#include "training/parts.h"
#include "training/topology_options.h"

namespace shoal {
namespace {

DecentralizedDataParallelOptions decentralized_options(const OptionValues& values, const TrainingOptions& options,
                                                       int ranks) {
  const auto local_size = values.count("topology_local_size");
  DecentralizedDataParallelOptions result{.topology = topology_of(values, options, ranks, local_size),
                                          .schedule = options.schedule,
                                          .clip_grad = options.clip_grad,
                                          .scaler = options.precision.scaler,
                                          .precision = options.precision,
                                          .ignored = options.ignored,
                                          .neighbour_timeout_seconds = values.number("neighbour_timeout"),
                                          .bucket_cap_mb = values.number("bucket_cap_mb")};
  const auto& dtype = values.text("exchange_dtype");
  if (dtype == "bf16") result.exchange_dtype = at::kBFloat16;
  if (dtype == "int8") result.compressed_exchange = CompressedExchange{};
  if (dtype == "top_k") result.compressed_exchange = CompressedExchange{.top_k = 0.01};
  return result;
}

class OptionTakingCore : public OpenCore<DecentralizedDataParallelCore> {
 public:
  using DecentralizedDataParallelCore::take_options_from;
  using OpenCore::OpenCore;
};

class Decentralized : public WrappedTraining<OpenCore<DecentralizedDataParallelCore>, TrainingCore> {
 public:
  explicit Decentralized(const TrainingParts& parts)
      : WrappedTraining(parts),
        parallel_(parts.module, parts.recipe, parts.group,
                  decentralized_options(parts.values, parts.options, parts.group.size())),
        whole_(parts.recipe.make(groups_of(parts))) {
    parallel_.take_options_from(*whole_);
  }

  at::Tensor scale_loss(const at::Tensor& loss) const override { return parallel_.scale_loss(loss); }
  bool step() override { return true; }
  void zero_grad() override {}
  torch::optim::Optimizer& optimizer() override { return *whole_; }
  std::vector<const torch::optim::Optimizer*> local_optimizers() const override {
    const auto list = parallel_.optimizers();
    return {list.begin(), list.end()};
  }
  OptimizerState optimizer_state() override { return parallel_.state_dict(); }
  std::optional<TrainingState> state() override { return TrainingState(parallel_); }
  // The mean of the ranks' models; training is not affected.
  std::shared_ptr<void> full_parameters() override {
    auto tensors = module_->parameters();
    for (const auto& buffer : module_->buffers()) tensors.push_back(buffer);
    auto mean = std::make_shared<CommonValues>(CommonValues::Of::mean, tensors, parallel_.remaining());
    mean_ = mean;
    return mean;
  }
  std::string open_scope() const override { return mean_.expired() ? parallel_.open_scope() : "full_parameters()"; }
  bool updates_in_backward() const override { return true; }
  bool has_whole_model() const override { return false; }
  std::optional<Group> active_group() override { return parallel_.remaining(); }
  int first_active_rank() const override { return first_of_those_left(parallel_.statistics()); }
  const ExchangeStatistics* exchanges() const override { return &parallel_.statistics(); }
  double consensus_distance() override { return parallel_.consensus_distance(); }

 protected:
  OpenCore<DecentralizedDataParallelCore>& wrapper() const override { return parallel_; }

 private:
  mutable OptionTakingCore parallel_;
  std::weak_ptr<CommonValues> mean_{};              // of full_parameters()
  std::unique_ptr<torch::optim::Optimizer> whole_;  // never steps
};

void check_decentralized(const OptionValues& values, const TrainingOptions& options, int ranks, std::optional<int>) {
  check_topology_options(values);
  if (!values.text("topology_file").empty() && values.given("topology_local_size")) {
    throw StrategyOptionError("topology_local_size", ": is for topologies by name, not for topology_file");
  }
  decentralized_options(values, options, ranks).validate(ranks);
}

}  // namespace

std::vector<Strategy> decentralized_strategies() {
  return {{.name = "decentralized",
           .help = "every rank averages with a few neighbours",
           .options = topology_option_list("ranks per host in the topology", {"float32", "bf16", "int8", "top_k"}),
           .synchronization = Synchronization::asynchronous,
           .logging_data = true,
           .takes_schedule = true,
           .check = check_decentralized,
           .make = [](const TrainingParts& parts) { return std::make_unique<Decentralized>(parts); }}};
}

}  // namespace shoal
