// Checkpoint source of FullyShardedDataParallel.

#include <torch/utils.h>

#include <algorithm>

#include "engine/checkpoint/names.h"
#include "strategy/fsdp/source.h"

namespace shoal {
namespace {

std::string name_of(ShardingStrategy strategy) {
  switch (strategy) {
    case ShardingStrategy::full_shard:
      return "fsdp";
    case ShardingStrategy::shard_grad_op:
      return "fsdp_grad_op";
    case ShardingStrategy::no_shard:
      return "fsdp_no_shard";
    case ShardingStrategy::hybrid_shard:
      return "hybrid";
    case ShardingStrategy::hybrid_shard_grad_op:
      return "hybrid_grad_op";
  }
  return "fsdp";
}

NamedSlice slice_of(const NamedTensor& entry, const Range& range, at::Tensor values) {
  return {.name = entry.name,
          .shape = entry.tensor.sizes().vec(),
          .range = range,
          .values = std::move(values),
          .order = memory_order(entry.tensor)};
}

}  // namespace

std::string FullyShardedSource::strategy() const {
  return name_of(shards_.options.sharding_strategy);
}

// Where ranks share memory, each has a copy of its own within the scope, which counts at its end.
void FullyShardedSource::require_own_values() const {
  if (!shards_.hold) return;
  throw UsageError(
      "FullyShardedDataParallel: a checkpoint within summon_full_params(): save and load outside of it; save_module() "
      "within "
      "it writes the module alone");
}

void FullyShardedSource::end_load(const CarriedStates& past) {
  const torch::NoGradGuard no_grad;
  ShardedSource::end_load(past);
  for (const auto& [buffer, copy] : converted_) at::Tensor(buffer).copy_(copy);
  const Label label{-1, -1, "loaded parameters"};
  for (const auto& frozen : shards_.frozen) {
    for (const auto& piece : frozen.pieces) {
      if (piece.exact.defined()) at::Tensor(piece.elements).copy_(piece.exact);
    }
    frozen.gather->publish(label);
  }
  for (const auto& frozen : shards_.frozen) frozen.gather->wait(label);
}

// Frozen parameters are sharded, too; ignored ones are whole on every rank, which may have its own values.
void FullyShardedSource::add_others(CheckpointView& view) {
  add_rest(view, *parallel_.module());
  for (const auto* list : {&view.rest, &view.buffers}) {
    for (const auto& slice : *list) {
      if (is_ignored(slice.name)) view.own.insert(slice.name);
    }
  }
  give_buffers_their_dtypes(view);
  std::erase_if(view.rest, [&](const NamedSlice& slice) { return is_sharded_here(slice.name); });
  for (const auto& frozen : shards_.frozen) {
    // Every rank lists all of them.
    for (const auto& entry : frozen.parameters) {
      const auto dtype = frozen.copies.defined() ? at::kFloat : entry.tensor.scalar_type();
      view.rest.push_back(slice_of(entry, {}, at::empty({0}, dtype)));
    }
    for (const auto& piece : frozen.pieces) {
      view.rest.push_back(slice_of(frozen.parameters[piece.slice.piece], piece.slice.in_piece, piece.values()));
    }
  }
}

// Buffers have another dtype in memory with buffer_dtype.
void FullyShardedSource::give_buffers_their_dtypes(CheckpointView& view) {
  converted_.clear();
  for (const auto& [buffer, dtype] : shards_.buffer_dtypes) {
    if (buffer.scalar_type() == dtype) continue;
    for (auto& slice : view.buffers) {
      if (!slice.values.is_same(buffer)) continue;
      slice.values = buffer.to(dtype);
      converted_.emplace_back(buffer, slice.values);
    }
  }
}

bool FullyShardedSource::is_ignored(const std::string& name) const {
  const auto& options = shards_.options;
  const auto within = [&](const std::string& module) { return name.starts_with(module + '.'); };
  const auto& names = options.ignored_parameters;
  return std::find(names.begin(), names.end(), name) != names.end() ||
         std::any_of(options.ignored_modules.begin(), options.ignored_modules.end(), within);
}

bool FullyShardedSource::is_sharded_here(const std::string& name) const {
  for (const auto& frozen : shards_.frozen) {
    for (const auto& entry : frozen.parameters) {
      if (entry.name == name) return true;
    }
  }
  return false;
}

std::shared_ptr<CheckpointSource> checkpoint_source(FullyShardedCore& parallel, FullyShardedOptimizerCore& optimizer) {
  return std::make_shared<FullyShardedSource>(parallel, *parallel.shards_, optimizer, optimizer.state());
}

}  // namespace shoal
