#include "cli/strategies/decentralized.h"

#include <fmt/format.h>

#include <algorithm>

#include "cli/strategies/optimizers.h"
#include "cli/strategies/schedules.h"
#include "cli/train/common_values.h"
#include "shoal/error.h"

namespace shoal::cli {
namespace {

// The named optimizer of a bucket's part of the model's param groups.
OptimizerOfNamed optimizer_of_buckets(const TrainOptions& options, const std::shared_ptr<models::Model>& model) {
  return [&options, model](const std::vector<NamedParameter>& named) {
    const auto kind = optimizer_kind(options);
    auto groups = kind.groups(*model);
    for (auto& group : groups) {
      std::erase_if(group.params(), [&](const at::Tensor& parameter) {
        return std::none_of(named.begin(), named.end(),
                            [&](const NamedParameter& entry) { return entry.parameter.is_same(parameter); });
      });
    }
    return kind.make(groups);
  };
}

DecentralizedDataParallelOptions wrapper_options(const TrainOptions& options, int ranks, int64_t total_steps) {
  DecentralizedDataParallelOptions result{.topology = topology_of(options, ranks, options.topology_local_size),
                                          .clip_grad = options.clip,
                                          .scaler = options.precision().scaler,
                                          .precision = options.precision(),
                                          .neighbour_timeout_seconds = options.neighbour_timeout,
                                          .bucket_cap_mb = options.ddp.bucket_cap_mb};
  if (options.exchange_dtype == "bf16") result.exchange_dtype = at::kBFloat16;
  if (options.exchange_dtype == "int8") result.compressed_exchange = CompressedExchange{};
  if (options.exchange_dtype == "top_k") result.compressed_exchange = CompressedExchange{.top_k = 0.01};
  if (options.schedule != "constant") {
    result.schedule = [&options, total_steps](torch::optim::Optimizer& optimizer) {
      return std::unique_ptr<torch::optim::LRScheduler>(make_schedule(options, optimizer, total_steps));
    };
  }
  return result;
}

class Decentralized : public Strategy {
 public:
  Decentralized(const TrainOptions& options, const std::shared_ptr<models::Model>& model, const Group& group,
                int64_t total_steps)
      : Strategy(options, model),
        parallel_(model, optimizer_of_buckets(options, model), group,
                  wrapper_options(options, group.size(), total_steps)) {
    const auto kind = optimizer_kind(options);
    rates_ = kind.make(kind.groups(*model));
  }

  at::Tensor forward(const at::Tensor& input) override { return parallel_.forward(input); }
  void backward(const at::Tensor& loss, bool last) override {
    const auto scope = parallel_.no_sync(!last);
    parallel_.scale_loss(loss).backward();
  }
  void step() override {}
  void zero_grad() override {}
  // The mean of the ranks' models: training goes on as if nobody had asked.
  std::shared_ptr<void> whole_parameters() override {
    auto tensors = model_->parameters();
    for (const auto& buffer : model_->buffers()) tensors.push_back(buffer);
    return std::make_shared<CommonValues>(CommonValues::Of::mean, tensors, parallel_.remaining());
  }
  bool has_whole_model() const override { return false; }
  std::optional<TrainingState> training_state(const Group&) override { return TrainingState(parallel_); }
  bool in_step() const override { return false; }
  std::optional<Group> present() const override { return parallel_.remaining(); }
  int leader() const override { return first_of_those_left(parallel_.statistics()); }
  torch::optim::Optimizer& optimizer() override { return *rates_; }
  std::vector<const torch::optim::Optimizer*> local_optimizers() const override {
    const auto list = parallel_.optimizers();
    return {list.begin(), list.end()};
  }
  std::optional<LoggingData> logging_data() const override { return parallel_.logging_data(); }
  std::string note() const override { return missed_exchanges(parallel_.statistics()); }
  std::vector<std::pair<std::string, double>> figures() override {
    return exchange_figures(parallel_.statistics(), parallel_.consensus_distance());
  }

 private:
  mutable DecentralizedDataParallel<models::Model> parallel_;
  std::unique_ptr<torch::optim::Optimizer> rates_;  // never steps: what a schedule makes of the rates, for the report
};

}  // namespace

Topology topology_of(const TrainOptions& options, int size, int local_size) {
  if (!options.topology_file.empty()) return read_topology(options.topology_file);
  return make_topology(options.topology, size, local_size, options.seed);
}

void check_decentralized(const TrainOptions& options, int ranks) {
  wrapper_options(options, ranks, /*total_steps=*/1).validate(ranks);
}

int first_of_those_left(const ExchangeStatistics& seen) {
  int first = 0;
  while (std::count(seen.removed.begin(), seen.removed.end(), first) > 0) ++first;
  return first;
}

std::string missed_exchanges(const ExchangeStatistics& seen) {
  const auto missed = seen.skipped + seen.older;
  std::string text = missed > 0 ? fmt::format("{} exchanges missed", missed) : "";
  if (!seen.removed.empty()) text += fmt::format("{}{} ranks gone", text.empty() ? "" : ", ", seen.removed.size());
  return text;
}

std::vector<std::pair<std::string, double>> exchange_figures(const ExchangeStatistics& seen,
                                                             double consensus_distance) {
  return {{"consensus_distance", consensus_distance},     {"exchanged", static_cast<double>(seen.exchanged)},
          {"newer", static_cast<double>(seen.newer)},     {"older", static_cast<double>(seen.older)},
          {"skipped", static_cast<double>(seen.skipped)}, {"removed", static_cast<double>(seen.removed.size())}};
}

std::unique_ptr<Strategy> make_decentralized(const TrainOptions& options, const std::shared_ptr<models::Model>& model,
                                             const Group& group, int64_t total_steps) {
  return std::make_unique<Decentralized>(options, model, group, total_steps);
}

}  // namespace shoal::cli
