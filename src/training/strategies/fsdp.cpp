// Strategies fsdp, fsdp_grad_op, fsdp_no_shard, hybrid and hybrid_grad_op.

#include "training/strategies/fsdp.h"

#include <fmt/format.h>

#include "training/builtin.h"
#include "training/wrapper_options.h"

namespace shoal {
namespace {

FullyShardedDataParallelOptions fsdp_options(const TrainingParts& parts, ShardingStrategy sharding) {
  FullyShardedDataParallelOptions options{.sharding_strategy = sharding,
                                          .auto_wrap_policy = units_of(parts),
                                          .shard_by_parameter = !parts.recipe.element_wise,
                                          .precision = parts.options.precision,
                                          .reduce_dtype = reduce_dtype_of(parts),
                                          .ignored_parameters = parts.options.ignored,
                                          .communication_hook = hook_of(parts.values, parts.options)};
  if (parts.strategy.has("shard_size") && parts.values.integer("shard_size") > 0) {
    options.shard_size = parts.values.count("shard_size");
  }
  return options;
}

void check_shard_size(int64_t size, int ranks) {
  if (size == 0 || ranks % size == 0) return;
  throw StrategyOptionError(
      "shard_size",
      fmt::format(" {}: {} ranks are not a multiple of it; give a number that divides them", size, ranks));
}

Strategy fsdp_strategy(const std::string& name, const std::string& help, ShardingStrategy sharding) {
  const bool hybrid = sharding == ShardingStrategy::hybrid_shard || sharding == ShardingStrategy::hybrid_shard_grad_op;
  auto options = fsdp_option_list();
  if (hybrid) {
    options.push_back({.name = "shard_size",
                       .type = StrategyOption::Type::integer,
                       .default_value = "0",
                       .help = "ranks, in a row, that share a model; 0: those of each host",
                       .minimum = 0});
  }
  const bool parts = !hybrid && sharding != ShardingStrategy::no_shard;
  const bool elastic = sharding != ShardingStrategy::no_shard;
  return {
      .name = name,
      .help = help,
      .options = std::move(options),
      .main_copies = true,
      .logging_data = true,
      .elastic = elastic,
      .takes_deferred = true,
      .check =
          [name, parts, hybrid](const OptionValues& values, const TrainingOptions&, int ranks, std::optional<int>) {
            parts ? check_hook_of_parts(name, values) : static_cast<void>(hook_of(values, {}));
            if (hybrid) check_shard_size(values.integer("shard_size"), ranks);
          },
      .make =
          [sharding](const TrainingParts& made) { return std::make_unique<FsdpTraining>(made, made.group, sharding); }};
}

}  // namespace

std::vector<StrategyOption> fsdp_option_list() {
  return {{.name = "unit_numel",
           .type = StrategyOption::Type::integer,
           .default_value = "0",
           .help = "elements of parameters that make a unit; 0: units as the program has them",
           .minimum = 0},
          fp32_gradients_option(false),
          compress_option()};
}

std::optional<WrapPolicy> units_of(const TrainingParts& parts) {
  const auto elements = parts.values.integer("unit_numel");
  return elements > 0 ? std::optional(wrap_size(elements)) : parts.options.units;
}

OptimizerRecipe::ParamGroups groups_of_units(const TrainingParts& parts) {
  return parts.recipe.groups ? groups_of(parts) : OptimizerRecipe::ParamGroups();
}

FullyShardedOptimizerOptions sharded_optimizer_options(const TrainingParts& parts) {
  return {.clip_grad = parts.options.clip_grad, .scaler = parts.options.precision.scaler};
}

std::optional<at::ScalarType> reduce_dtype_of(const TrainingParts& parts) {
  if (!parts.values.flag("grad_reduce_in_fp32")) return std::nullopt;
  bool narrow = false;
  bool wide = false;
  for (const auto& parameter : parts.module->parameters()) {
    if (!parameter.is_floating_point()) continue;
    const auto bytes = c10::elementSize(parameter.scalar_type());
    narrow = narrow || bytes < sizeof(float);
    wide = wide || bytes > sizeof(float);
  }
  if (narrow && wide) {
    throw StrategyOptionError("grad_reduce_in_fp32",
                              ": the module has parameters of 16 and of 64 bits, and FSDP sums all gradients in one "
                              "dtype: leave it out, or convert the module to one dtype");
  }
  return narrow ? std::optional(at::kFloat) : std::nullopt;
}

FsdpTraining::FsdpTraining(const TrainingParts& parts, const Group& group, ShardingStrategy sharding,
                           const MakeOptimizer& make)
    : WrappedTraining(parts) {
  auto groups = groups_of_units(parts);  // before parameters are sharded
  parallel_ = std::make_unique<OpenFullyShardedCore>(parts.module, group, fsdp_options(parts, sharding));
  if (make) {
    optimizer_ = make(*parallel_);
    return;
  }
  optimizer_ = std::make_unique<FullyShardedOptimizerCore>(*parallel_, std::move(groups),
                                                           parts.recipe.defaults->clone(), parts.recipe.make,
                                                           parts.recipe.element_wise, sharded_optimizer_options(parts));
}

std::vector<at::Tensor> FsdpTraining::parameters() const {
  return parallel_->shared() ? module_->parameters() : parallel_->own_elements();
}

std::shared_ptr<void> FsdpTraining::full_parameters() {
  return std::make_shared<FullParameters>(*parallel_, SummonFullParamsOptions{.writeback = false}, /*reads_only=*/true);
}

std::vector<Strategy> fsdp_strategies() {
  return {
      fsdp_strategy("fsdp", "parameters, gradients and optimizer state are sharded; a unit is whole while it is used",
                    ShardingStrategy::full_shard),
      fsdp_strategy("fsdp_grad_op", "fsdp with parameters that stay whole from forward to the end of backward",
                    ShardingStrategy::shard_grad_op),
      fsdp_strategy("hybrid", "fsdp on each host", ShardingStrategy::hybrid_shard),
      fsdp_strategy("hybrid_grad_op", "fsdp_grad_op on each host", ShardingStrategy::hybrid_shard_grad_op),
      fsdp_strategy("fsdp_no_shard", "fsdp without sharding", ShardingStrategy::no_shard)};
}

}  // namespace shoal
