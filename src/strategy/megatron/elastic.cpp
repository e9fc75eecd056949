// DistributedOptimizer in an elastic job.

#include <c10/util/ScopeExit.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <utility>

#include "engine/wrapper/data_parallel_state.h"
#include "shoal/error.h"
#include "strategy/megatron/chunk.h"
#include "strategy/megatron/chunk_names.h"
#include "strategy/megatron/reduction.h"

namespace shoal {

void DistributedOptimizerCore::require_regroupable() const {
  const auto& options = reduction_->options;
  if (reduction_->modules.size() > 1) {
    throw UsageError("Elastic: a DistributedOptimizer of several chunks is not supported");
  }
  auto faults = keepers_of_groups(*reduction_->modules.front(), state().modules.front()->reducer());
  if (options.reuse_grad_buf_for_param_gather) {
    faults.emplace_back(
        "reuse_grad_buf_for_param_gather leaves parameters in each rank's own memory, which ends with the rank: unset "
        "it");
  }
  if (state().has_replicas() && options.communication_hook) {
    faults.emplace_back("a communication_hook between hosts is not supported");
  }
  if (options.model_parallel_group) faults.emplace_back("model_parallel_group has ranks of other replicas' stages");
  if (!reduction_->declared.empty()) faults.emplace_back("all_reduce_grads() keeps groups of its own");
  if (!faults.empty()) throw UsageError(fmt::format("Elastic: DistributedOptimizer: {}", fmt::join(faults, "; ")));
  if (needs_second_owners(group())) return require_second_owners();
  ShardedOptimizerCore::require_regroupable();
}

bool DistributedOptimizerCore::shards_across_hosts() const {
  return !reduction_->options.shard_within_host;
}

bool DistributedOptimizerCore::needs_second_owners(const Group& job) const {
  return shards_across_hosts() && job.size() > 1 && job.transport() != "host";
}

void DistributedOptimizerCore::require_second_owners() const {
  if (!reduction_->options.communication_hook) return;
  throw UsageError(
      "Elastic: DistributedOptimizer: a communication_hook is not supported where shards have second owners, on "
      "several hosts or over sockets: leave it out");
}

// The former chunks keep their memory until the parameters have moved out of it.
void DistributedOptimizerCore::regroup(const Group& group, int64_t step) {
  if (shards_across_hosts()) {
    const bool apart = needs_second_owners(group);
    if (apart) require_second_owners();  // which the ranks before did not need
    begin_regroup(group, apart);
  }
  // One that was frozen since it was wrapped stays among those that have owners: only these may have its last values.
  std::vector<at::Tensor> frozen_since;
  for (const auto& gradient : state().modules.front()->reducer().gradients()) {
    if (!has_second_owners() || gradient.parameter.requires_grad()) continue;
    frozen_since.push_back(gradient.parameter);
    frozen_since.back().requires_grad_(true);
  }
  const auto freeze_again = c10::make_scope_exit([&] {
    for (auto& parameter : frozen_since) parameter.requires_grad_(false);
  });
  const auto& modules = reduction_->modules;
  std::vector<std::shared_ptr<ShardedModule>> made;
  const auto groups = groups_of(group, reduction_->options);
  for (size_t number = 0; number < modules.size(); ++number) {
    const auto& remains = state().modules[number]->retire();
    made.push_back(make_chunk(reduction_->tensors(number), groups, reduction_->options, state().element_wise,
                              chunk_prefix(modules, number)));
    made.back()->know(KnownModule(modules[number], state().name));
    made.back()->resume(remains);
    auto& reducer = made.back()->reducer();
    if (auto* hook = reducer.reduction().hook()) hook->reset();
    reducer.count_from(step);
  }
  reduction_->reduced = false;
  ShardedOptimizerCore::regroup(groups.shard, group, std::move(made), step);
  connect_chunks();
}

void DistributedOptimizerCore::before_backward(std::function<void()> listener) {
  reduction_->before_backward = std::move(listener);
}

void DistributedOptimizerCore::set_share(std::optional<double> share) {
  reduction_->share = share;
}

Reducer& DistributedOptimizerCore::reducer() const {
  return state().modules.front()->reducer();
}

ModuleTensors DistributedOptimizerCore::tensors() const {
  return reduction_->tensors(0);
}

const DistributedOptimizerCore::Modules& DistributedOptimizerCore::modules() const {
  return reduction_->modules;
}

}  // namespace shoal
