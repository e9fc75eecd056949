// Strategies local_sgd, slowmo and diloco. They evaluate and save the mean of the ranks' parameters.

#include "shoal/local_updates.h"
#include "training/builtin.h"
#include "training/strategies/replicated.h"

namespace shoal {
namespace {

LocalUpdatesOptions local_updates_options(const std::string& strategy, const OptionValues& values,
                                          const TrainingOptions& options) {
  LocalUpdatesOptions local{.every = values.integer("sync_every"),
                            .fragments = values.count("fragments"),
                            .delay = values.integer("sync_delay"),
                            .average_buffers = true,
                            .ignored = options.ignored};
  const auto& dtype = values.text("reduce_dtype");
  if (!dtype.empty()) local.reduce_dtype = dtype == "bf16" ? at::kBFloat16 : at::kFloat;
  if (strategy == "slowmo") {
    local.outer = SlowMo{.slow_lr = values.number("outer_lr"), .slow_momentum = values.number("outer_momentum")};
  } else if (strategy == "diloco") {
    local.outer = OuterNesterov{.lr = values.number("outer_lr"), .momentum = values.number("outer_momentum")};
  }
  return local;
}

class WithLocalUpdates : public ReplicatedTraining {
 public:
  explicit WithLocalUpdates(const TrainingParts& parts)
      : ReplicatedTraining(parts),
        local_(parts.module, *optimizer_, parts.group,
               local_updates_options(parts.strategy.name, parts.values, parts.options)) {}

  void zero_grad() override { local_.zero_grad(); }
  LocalUpdates* local_updates() override { return &local_; }
  std::optional<TrainingState> state() override { return scaled(TrainingState(local_)); }
  std::shared_ptr<void> full_parameters() override {
    auto mean = std::make_shared<MeanParameters>(local_.mean_parameters());
    mean_ = mean;
    return mean;
  }
  std::string open_scope() const override { return mean_.expired() ? "" : "full_parameters()"; }

 private:
  void update(bool finite) override { local_.step(finite); }

  LocalUpdates local_;
  std::weak_ptr<MeanParameters> mean_{};  // of full_parameters()
};

std::vector<StrategyOption> local_update_option_list() {
  return {{.name = "sync_every",
           .type = StrategyOption::Type::integer,
           .default_value = "20",
           .help = "steps between two exchanges of a parameter",
           .minimum = 1},
          {.name = "fragments",
           .type = StrategyOption::Type::integer,
           .default_value = "1",
           .help = "number of parts of the model, which are exchanged at different steps",
           .minimum = 1},
          {.name = "sync_delay",
           .type = StrategyOption::Type::integer,
           .default_value = "0",
           .help = "steps between sending an exchange and applying it",
           .minimum = 0},
          {.name = "reduce_dtype",
           .help = "dtype of exchanges (default: dtype of the parameters)",
           .choices = {"float32", "bf16"}}};
}

Strategy local_update_strategy(const std::string& name, const std::string& help, std::vector<StrategyOption> options) {
  return {.name = name,
          .help = help,
          .options = std::move(options),
          .elastic = true,
          .check = [name](const OptionValues& values, const TrainingOptions& chosen, int,
                          std::optional<int>) { local_updates_options(name, values, chosen).validate(); },
          .make = [](const TrainingParts& parts) { return std::make_unique<WithLocalUpdates>(parts); }};
}

Strategy with_outer(const std::string& name, const std::string& help, const char* lr, const char* momentum) {
  auto options = local_update_option_list();
  options.push_back({.name = "outer_lr",
                     .type = StrategyOption::Type::number,
                     .default_value = lr,
                     .help = "learning rate of the outer optimizer"});
  options.push_back({.name = "outer_momentum",
                     .type = StrategyOption::Type::number,
                     .default_value = momentum,
                     .help = "momentum of the outer optimizer"});
  return local_update_strategy(name, help, std::move(options));
}

}  // namespace

std::vector<Strategy> local_update_strategies() {
  return {local_update_strategy("local_sgd", "ranks exchange parameters every sync_every steps",
                                local_update_option_list()),
          with_outer("slowmo", "local_sgd with momentum between exchanges", "1", "0.5"),
          with_outer("diloco", "local_sgd with Nesterov momentum between exchanges", "0.7", "0.9")};
}

}  // namespace shoal
