// FullyShardedDataParallel and its optimizer in an elastic job.

#include <c10/util/ScopeExit.h>
#include <fmt/format.h>

#include <utility>

#include "comm/group/hosts.h"
#include "engine/sharded/sharded_ranges.h"
#include "shoal/error.h"
#include "strategy/fsdp/ignored.h"
#include "strategy/fsdp/shards.h"

namespace shoal {
namespace {

[[noreturn]] void refuse(const std::string& fault) {
  throw UsageError("Elastic: FullyShardedDataParallel: " + fault);
}

[[noreturn]] void refuse_hosts_with_pages(ShardingStrategy strategy) {
  refuse(fmt::format(
      "sharding_strategy {} needs hosts whose ranks share memory: take the transport auto, or full_shard, of whose "
      "shards each has a second owner",
      sharding_name(strategy)));
}

}  // namespace

void FullyShardedCore::require_regroupable() {
  state().require_regroupable();
  const auto& options = shards_->options;
  const auto strategy = options.sharding_strategy;
  if (strategy == ShardingStrategy::no_shard) {
    refuse(fmt::format("sharding_strategy {} is not supported: use DistributedDataParallel", sharding_name(strategy)));
  }
  if (is_hybrid(strategy) && options.shard_size) {
    refuse("shard_size is not supported, since ranks change: leave it out, and each host has one copy of the model");
  }
  if (shards_->groups.replicated() && options.communication_hook) {
    refuse("a communication_hook between hosts is not supported");
  }
  if (shards_->pager && shards_->groups.replicated()) refuse_hosts_with_pages(strategy);
  if (shards_->pager) require_second_owners();
  if (!wrappers_within(*module(), *this).empty()) {
    refuse("sub-modules with a wrapper of their own are not supported: use auto_wrap_policy of one wrapper");
  }
}

void FullyShardedCore::require_second_owners() const {
  if (shards_->options.communication_hook) {
    refuse(
        "a communication_hook is not supported where shards have second owners, on several hosts or over sockets: "
        "leave it out");
  }
  if (!shards_->frozen.empty()) {
    refuse(fmt::format(
        "frozen parameters, such as {}, are not supported where shards have second owners, on several hosts or over "
        "sockets: name them in ignored_parameters, which are whole on each rank, and put them in "
        "ElasticOptions::tensors if ranks join, or take hybrid_shard over the transport auto",
        shards_->frozen.front().parameters.front().name));
  }
}

bool FullyShardedCore::needs_second_owners(const Group& job) const {
  const bool one_group = !is_hybrid(shards_->options.sharding_strategy) || names_of_hosts(job).size() == 1;
  return one_group && !always_present(job, state().tensors);
}

void FullyShardedCore::compute_shares(bool now) {
  if (now && shards_->pager && shards_->options.check_unit_order) {
    refuse(
        "check_unit_order compares the passes of all ranks, which with keep_global_batch are more on ranks that "
        "compute one slice more: leave one of them out");
  }
  // While all ranks are here: a pass of a share that only some compute must not have to ask the others.
  if (now && shards_->pager) adopt_changes(/*training=*/false);
  shards_->computes_shares = now;
}

void FullyShardedCore::meet_behind_share() {
  if (shards_->pager) shards_->pager->meet();
}

std::vector<at::Tensor> FullyShardedCore::frozen_copies() const {
  std::vector<at::Tensor> list;
  for (const auto& frozen : shards_->frozen) {
    if (!frozen.copies.defined()) continue;
    for (size_t piece = 0; piece < frozen.parameters.size(); ++piece) {
      const auto range = frozen.layout.range(piece);
      list.push_back(frozen.copies.narrow(0, range.begin, range.size()));
    }
  }
  return list;
}

// The former module keeps its memory until the parameters have moved out of it. filled: parameters can be read there.
void FullyShardedCore::regroup(const ShardGroups& groups, int64_t step, bool filled) {
  const auto former = shards_->module;
  auto frozen = std::exchange(shards_->frozen, {});
  // A parameter that was frozen since it was wrapped stays among those that ranks divide as they are trained.
  std::vector<at::Tensor> frozen_since;
  for (const auto& gradient : former->reducer().gradients()) {
    if (filled || gradient.parameter.requires_grad()) continue;
    frozen_since.push_back(gradient.parameter);
    frozen_since.back().requires_grad_(true);
  }
  const auto freeze_again = c10::make_scope_exit([&] {
    for (auto& parameter : frozen_since) parameter.requires_grad_(false);
  });
  const auto& remains = former->retire();
  state().group = groups.all;
  state().entered = false;
  shards_->groups = groups;
  shards_->pager.reset();
  try {
    shard_parameters(state(), *shards_, frozen, filled);
  } catch (...) {
    shards_->frozen = std::move(frozen);  // the next try takes the copies from there
    throw;
  }
  shards_->module->resume(remains);
  auto& reducer = shards_->module->reducer();
  if (auto* hook = reducer.reduction().hook()) hook->reset();
  reducer.count_from(step);
  connect_reducer();
}

void FullyShardedOptimizerCore::require_own(const FullyShardedCore& parallel) const {
  if (state().modules.front() == parallel.shards_->module) return;
  throw UsageError("Elastic: the optimizer is not the one of this FullyShardedDataParallel");
}

void FullyShardedOptimizerCore::require_regroupable(const FullyShardedCore& parallel, const Group& /*job*/) {
  require_own(parallel);
  if (parallel.shared()) ShardedOptimizerCore::require_regroupable();
}

void FullyShardedOptimizerCore::regroup(FullyShardedCore& parallel, const Group& job, int64_t step) {
  const auto& options = parallel.shards_->options;
  const auto groups = make_shard_groups(job, options);
  if (groups.replicated()) {
    // Ranks of another host may have come to one whose shards have second owners.
    const bool present = !has_second_owners() && always_present(groups.shard, parallel.state().tensors);
    const Label label{step, -1, "whether ranks of each host share memory"};
    if (job.all_reduce(present ? 1 : 0, ReduceOp::min, label) == 0) {
      refuse_hosts_with_pages(options.sharding_strategy);
    }
  } else {
    const bool has_pages = parallel.needs_second_owners(job);
    if (has_pages) parallel.require_second_owners();  // which the ranks before did not need
    begin_regroup(job, has_pages);
  }
  regroup(parallel, groups, job, step);
}

void FullyShardedOptimizerCore::regroup(FullyShardedCore& parallel, const ShardGroups& groups, const Group& job,
                                        int64_t step) {
  parallel.regroup(groups, step, !has_second_owners());
  state().wait_at_first_touch = parallel.shards_->pager != nullptr;
  ShardedOptimizerCore::regroup(groups.shard, job, {parallel.shards_->module}, step);
}

}  // namespace shoal
