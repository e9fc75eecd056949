#pragma once
// Tests' names for strategies of the registry with some of their options.

#include <map>
#include <string>

#include "shoal/training.h"

namespace shoal::test {

struct Variant {
  std::string strategy;  // name in the registry
  StrategyOptions options{};
};

// Number of ranks that share a model under the hybrid strategies.
inline int ranks_per_model(const Group& group) {
  return group.size() % 2 == 0 ? 2 : 1;
}

// Names that are not listed are the registry's own.
inline Variant variant(const std::string& name, const Group& group) {
  const StrategyOptions pairs{{"shard_size", std::to_string(ranks_per_model(group))}};
  const std::map<std::string, Variant> variants{
      {"ddp_own_gradients", {"ddp", {{"no_bucket_view", "true"}}}},
      {"megatron_in_grads", {"megatron", {{"reuse_grad_buf_for_param_gather", "true"}}}},
      {"megatron_no_overlap", {"megatron", {{"no_overlap_grad_reduce", "true"}}}},
      {"megatron_late_gather", {"megatron", {{"overlap_param_gather", "true"}}}},
      {"fsdp_hybrid", {"hybrid", pairs}},
      {"fsdp_hybrid_grad_op", {"hybrid_grad_op", pairs}},
      {"shard_gossip", {"hybrid_gossip", {{"topology_local_size", std::to_string(ranks_per_model(group))}}}}};
  const auto found = variants.find(name);
  return found == variants.end() ? Variant{name} : found->second;
}

// Adds the values for which the strategy has an option.
inline void add_known(Variant& variant, const StrategyOptions& values) {
  const auto& strategy = find_strategy(variant.strategy);
  for (const auto& [name, value] : values) {
    if (strategy.has(name)) variant.options.try_emplace(name, value);
  }
}

}  // namespace shoal::test
