// Checkpoint source of FullyShardedDataParallel.

#include <torch/utils.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "engine/checkpoint/names.h"
#include "module/walk.h"
#include "strategy/fsdp/ignored.h"
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

NamedSlice slice_of(std::string name, const at::Tensor& parameter, const Range& range, at::Tensor values) {
  return {.name = std::move(name),
          .shape = parameter.sizes().vec(),
          .range = range,
          .values = std::move(values),
          .order = memory_order(parameter)};
}

// Names of parameters in the module that is saved, of which a wrapper inside knows only the last part.
using Names = std::map<const c10::TensorImpl*, std::string>;

Names names_in(const torch::nn::Module& module) {
  Names names;
  for (const auto& entry : walk(module, {}).parameters) names.emplace(entry.tensor.unsafeGetTensorImpl(), entry.name);
  return names;
}

// Every rank lists every parameter, and the elements that it owns.
void add_frozen(const FullyShardedCore::Shards& shards, const Names& names, std::vector<NamedSlice>& slices) {
  const auto add = [&](const at::Tensor& parameter, const Range& range, at::Tensor values) {
    slices.push_back(slice_of(names.at(parameter.unsafeGetTensorImpl()), parameter, range, std::move(values)));
  };
  for (const auto& frozen : shards.frozen) {
    for (const auto& entry : frozen.parameters) {
      const auto dtype = frozen.copies.defined() ? at::kFloat : entry.tensor.scalar_type();
      add(entry.tensor, {}, at::empty({0}, dtype));
    }
    for (const auto& piece : frozen.pieces) {
      add(frozen.parameters[piece.slice.piece].tensor, piece.slice.in_piece, frozen.current(piece));
    }
  }
}

// The same of parameters that an optimizer of their own updates, in its precision.
void add_trainable(const ShardedModule& module, const Names& names, std::vector<NamedSlice>& slices) {
  std::string listed;
  for (const auto& piece : module.state_pieces("")) {
    const auto& name = names.at(piece.parameter.unsafeGetTensorImpl());
    const auto dtype = has_copy(piece.parameter) ? at::kFloat : piece.parameter.scalar_type();
    if (std::exchange(listed, name) != name) {
      slices.push_back(slice_of(name, piece.parameter, {}, at::empty({0}, dtype)));
    }
    if (piece.owner != module.shard().rank() || !piece.updated.defined()) continue;
    const auto values = piece.values();
    slices.push_back(piece.whole() ? whole_slice(name, values) : slice_of(name, piece.parameter, piece.range, values));
  }
}

}  // namespace

std::string FullyShardedSource::strategy() const {
  return name_of(shards_.options.sharding_strategy);
}

// Where ranks share memory, each has a copy of its own within the scope, which counts at its end.
void FullyShardedSource::require_own_values() const {
  const auto within = shards_within();
  const auto held = [](const Shards* shards) { return shards->hold.has_value(); };
  if (!shards_.hold && std::none_of(within.begin(), within.end(), held)) return;
  throw UsageError(
      "FullyShardedDataParallel: a checkpoint within summon_full_params(): save and load outside of it; save_module() "
      "within it writes the module alone");
}

void FullyShardedSource::end_load(const CarriedStates& past) {
  const torch::NoGradGuard no_grad;
  ShardedSource::end_load(past);
  for (const auto& [buffer, copy] : converted_) at::Tensor(buffer).copy_(copy);
  const Label label{-1, -1, "loaded parameters"};
  auto all = shards_within();
  all.push_back(&shards_);
  for (const auto* shards : all) {
    for (const auto& frozen : shards->frozen) {
      for (const auto& piece : frozen.pieces) {
        if (piece.exact.defined()) at::Tensor(piece.elements).copy_(piece.exact);
      }
      frozen.gather->publish(label);
    }
  }
  for (const auto* shards : all) {
    for (const auto& frozen : shards->frozen) frozen.gather->wait(label);
  }
}

std::vector<FullyShardedSource::Shards*> FullyShardedSource::shards_within() const {
  std::vector<Shards*> list;
  if (shards_of_ == nullptr) return list;
  for (auto* wrapper : wrappers_within(*parallel_.module(), parallel_)) list.push_back(&shards_of_(*wrapper));
  return list;
}

std::vector<std::shared_ptr<ShardedModule>> FullyShardedSource::modules() const {
  auto list = ShardedSource::modules();
  for (const auto* shards : shards_within()) list.push_back(shards->module);
  return list;
}

// Frozen parameters are sharded, too, and so are those of wrappers inside, of which this rank may not have all in
// memory. Ignored ones are whole on every rank, which may have its own values.
void FullyShardedSource::add_others(CheckpointView& view) {
  const auto names = names_in(*parallel_.module());
  std::vector<NamedSlice> sharded;
  add_frozen(shards_, names, sharded);
  for (const auto* shards : shards_within()) {
    add_trainable(*shards->module, names, sharded);
    add_frozen(*shards, names, sharded);
  }
  add_rest(view, *parallel_.module());
  for (const auto* list : {&view.rest, &view.buffers}) {
    for (const auto& slice : *list) {
      if (is_ignored(slice.name)) view.own.insert(slice.name);
    }
  }
  give_buffers_their_dtypes(view);
  std::set<std::string> listed;
  for (const auto& slice : sharded) listed.insert(slice.name);
  for (auto* list : {&view.rest, &view.buffers}) {
    std::erase_if(*list, [&](const NamedSlice& slice) { return listed.contains(slice.name); });
  }
  view.rest.insert(view.rest.end(), sharded.begin(), sharded.end());
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

std::shared_ptr<CheckpointSource> checkpoint_source(FullyShardedCore& parallel, FullyShardedOptimizerCore& optimizer) {
  const auto shards_of = [](FullyShardedCore& wrapper) -> FullyShardedCore::Shards& { return *wrapper.shards_; };
  return std::make_shared<FullyShardedSource>(parallel, *parallel.shards_, optimizer, optimizer.state(), shards_of);
}

}  // namespace shoal
