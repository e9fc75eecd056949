// Options of FullyShardedDataParallel: validation, and comparison over ranks.

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/types.h>

#include <algorithm>

#include "engine/wrapper/logging.h"
#include "shoal/error.h"
#include "strategy/fsdp/shards.h"

namespace shoal {
namespace {

bool is_narrow_or_wide(at::ScalarType dtype) {
  return dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat || dtype == at::kDouble;
}

template <class Number>
std::string text_of(const std::optional<Number>& number) {
  return number ? std::to_string(*number) : "none";
}

std::string list_of(std::vector<std::string> names) {
  std::sort(names.begin(), names.end());
  return fmt::format("{}", fmt::join(names, ", "));
}

}  // namespace

std::string name_of(const std::optional<at::ScalarType>& dtype) {
  return dtype ? c10::toString(*dtype) : "none";
}

std::string sharding_name(ShardingStrategy strategy) {
  switch (strategy) {
    case ShardingStrategy::full_shard:
      return "full_shard";
    case ShardingStrategy::shard_grad_op:
      return "shard_grad_op";
    case ShardingStrategy::no_shard:
      return "no_shard";
    case ShardingStrategy::hybrid_shard:
      return "hybrid_shard";
    default:
      return "hybrid_shard_grad_op";
  }
}

void FullyShardedDataParallelOptions::validate() const {
  std::vector<std::string> faults;
  if (unit_limit < 1) faults.emplace_back("unit_limit 0: give at least 1 unit");
  if (byte_limit && *byte_limit < 1) faults.push_back(fmt::format("byte_limit {}: give at least 1 byte", *byte_limit));
  if (prefetch_units >= unit_limit) {
    faults.push_back(fmt::format("prefetch_units {} leaves no room in unit_limit {} for the unit in use",
                                 prefetch_units, unit_limit));
  }
  if (shard_size && *shard_size < 1) faults.push_back(fmt::format("shard_size {}: give at least 1 rank", *shard_size));
  const bool hybrid = is_hybrid(sharding_strategy);
  if (shard_size && !hybrid) faults.emplace_back("shard_size is for the hybrid strategies");
  for (const auto& [name, dtype] : {std::pair("param_dtype", param_dtype), std::pair("reduce_dtype", reduce_dtype),
                                    std::pair("buffer_dtype", buffer_dtype)}) {
    if (!dtype || is_narrow_or_wide(*dtype)) continue;
    faults.push_back(fmt::format("{} {}: give a floating-point dtype of 16 to 64 bits", name, c10::toString(*dtype)));
  }
  if (!faults.empty()) throw UsageError(fmt::format("FullyShardedDataParallel: {}", fmt::join(faults, "; ")));
}

std::vector<std::string> describe(const FullyShardedDataParallelOptions& options) {
  return {"sharding_strategy " + sharding_name(options.sharding_strategy),
          "shard_size " + text_of(options.shard_size),
          "sync_module_states " + yes_or_no(options.sync_module_states),
          "shard_by_parameter " + yes_or_no(options.shard_by_parameter),
          "param_dtype " + name_of(options.param_dtype),
          "reduce_dtype " + name_of(options.reduce_dtype),
          "buffer_dtype " + name_of(options.buffer_dtype),
          "precision " + name_of(options.precision.compute),
          "communication_hook " + in_words(options.communication_hook.get()),
          "cpu_offload " + yes_or_no(options.cpu_offload),
          "ignored_modules " + list_of(options.ignored_modules),
          "ignored_parameters " + list_of(options.ignored_parameters),
          "unit_limit " + std::to_string(options.unit_limit),
          "prefetch_units " + std::to_string(options.prefetch_units),
          "byte_limit " + text_of(options.byte_limit),
          "check_unit_order " + yes_or_no(options.check_unit_order)};
}

}  // namespace shoal
