#include "strategy/fsdp/shards.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/utils.h>

#include <algorithm>
#include <map>
#include <unordered_map>

#include "checkpoint/on_all_ranks.h"
#include "comm/group/hosts.h"
#include "comm/group/rank_groups.h"
#include "engine/buckets/small_buckets.h"
#include "engine/reducer/hooked_reduction.h"
#include "engine/sharded/ownership.h"
#include "memory/views.h"
#include "shoal/deferred_init.h"
#include "shoal/error.h"
#include "shoal/group.h"
#include "strategy/fsdp/originals.h"

namespace shoal {

ShardGroups make_shard_groups(const Group& group, const FullyShardedDataParallelOptions& options) {
  const auto hosts = hosts_of(group);
  auto size = options.shard_size;
  if (!is_hybrid(options.sharding_strategy)) {
    size = options.sharding_strategy == ShardingStrategy::no_shard ? 1 : group.size();
  }
  auto made = make_shard_groups(
      group, size ? rank_groups(hosts, size, "FullyShardedDataParallel", "shard_size") : ranks_by_host(hosts));
  if (!made.equal && options.communication_hook) {
    throw UsageError(
        "FullyShardedDataParallel: a communication_hook needs equally many ranks on each host, as those that own the "
        "same shards call it: start the same number on each, or set shard_size");
  }
  return made;
}

std::vector<Group> FullyShardedCore::groups() const {
  const auto& groups = shards_->groups;
  std::vector<Group> list{groups.all, groups.shard};
  if (groups.replicas) list.push_back(*groups.replicas);
  if (shards_->pager) list.push_back(shards_->pager->group());
  return list;
}

std::string title(const Unit& unit) {
  return "unit " + (unit.name.empty() ? unit.parameters.front().name : unit.name);
}

namespace {

void check(const ModuleTensors& tensors, const FullyShardedDataParallelOptions& options) {
  const auto device = tensors.parameters.front().tensor.device();
  if (options.cpu_offload && !device.is_cpu()) {
    throw UsageError(
        fmt::format("FullyShardedDataParallel: cpu_offload: the model is on {}; offloading from there is not "
                    "supported yet",
                    device.str()));
  }
  for (const auto& entry : tensors.parameters) {
    if (!entry.tensor.is_floating_point()) {
      throw UsageError(
          fmt::format("FullyShardedDataParallel: parameter {} is {}; only floating-point parameters can be sharded: "
                      "make it a buffer, or ignore it",
                      entry.name, c10::toString(entry.tensor.scalar_type())));
    }
  }
}

void agree_on_units(const Group& group, const std::vector<Unit>& units) {
  std::vector<std::string> lines;
  for (const auto& unit : units) {
    std::vector<std::string> names;
    for (const auto& entry : unit.parameters) names.push_back(entry.name);
    lines.push_back(fmt::format("{}: {}", title(unit), fmt::join(names, ", ")));
  }
  agree(group, "the units of the model", lines);
}

// The limit must hold one unit in use and the prefetched ones.
void check_byte_limit(const std::vector<Unit>& units, const FullyShardedDataParallelOptions& options, int ranks) {
  const auto count = static_cast<int64_t>(options.prefetch_units + 1);
  for (const auto& unit : units) {
    int64_t bytes = 0;
    for (const auto& entry : unit.parameters) {
      const auto size = c10::elementSize(options.param_dtype.value_or(entry.tensor.scalar_type()));
      bytes += scatter_layout(std::vector{entry.tensor.numel()}, size, ranks).size() * static_cast<int64_t>(size);
    }
    if (bytes * count <= *options.byte_limit) continue;
    throw UsageError(
        fmt::format("FullyShardedDataParallel: byte_limit {} is too small for {}, {} bytes, and prefetch_units {}; "
                    "give at least {}",
                    *options.byte_limit, title(unit), bytes, options.prefetch_units, bytes * count));
  }
}

// Converts floating-point buffers; returns all buffers with their original dtypes.
std::vector<std::pair<at::Tensor, at::ScalarType>> convert_buffers(const ModuleTensors& tensors, at::ScalarType dtype) {
  std::vector<std::pair<at::Tensor, at::ScalarType>> own;
  for (const auto& entry : tensors.buffers) {
    own.emplace_back(entry.tensor, entry.tensor.scalar_type());
    if (entry.tensor.is_floating_point()) at::Tensor(entry.tensor).set_data(entry.tensor.detach().to(dtype));
  }
  return own;
}

// Materializes deferred parameters, and their originals in full precision.
void materialize_and_broadcast(const ShardGroups& groups, std::vector<at::Tensor> tensors, bool sync,
                               const std::string& name) {
  std::erase_if(tensors, [](const at::Tensor& tensor) { return !is_deferred(tensor); });
  if (tensors.empty()) return;
  materialize(tensors);
  if (sync) broadcast_coalesced(groups.all, tensors, 0, {-1, -1, name});
}

// Memory that can be read, with any values, for parameters that lie on pages of a group that has ended.
void give_memory(const std::vector<NamedTensor>& parameters) {
  for (const auto& entry : parameters) {
    const auto& parameter = entry.tensor;
    at::Tensor(parameter).set_data(
        at::empty_strided(parameter.sizes(), dense_strides(parameter), parameter.options().requires_grad(false)));
  }
}

// A unit's frozen parameters, grouped by dtype and by whether they get float32 copies.
std::vector<std::vector<NamedTensor>> frozen_of(const Unit& unit, const Originals& originals) {
  std::map<std::pair<at::ScalarType, bool>, std::vector<NamedTensor>> kinds;
  for (const auto& entry : unit.parameters) {
    if (entry.tensor.requires_grad()) continue;
    kinds[{entry.tensor.scalar_type(), originals.copied(entry.tensor)}].push_back(entry);
  }
  std::vector<std::vector<NamedTensor>> lists;
  for (auto& [kind, list] : kinds) lists.push_back(std::move(list));
  return lists;
}

}  // namespace

void shard_parameters(DataParallelCore::State& state, FullyShardedCore::Shards& shards,
                      const std::vector<FullyShardedCore::Shards::Frozen>& former, bool filled) {
  const torch::NoGradGuard no_grad;
  const auto& groups = shards.groups;
  const auto& shard = groups.shard;
  check(state.tensors, shards.options);
  shards.units = divide(*state.module, state.tensors, shards.options.auto_wrap_policy);
  agree_on_units(groups.all, shards.units);
  const bool present = always_present(shard, state.tensors);
  if (shards.options.byte_limit) {
    on_all_ranks(groups.all, "byte_limit", [&] {
      if (!present) check_byte_limit(shards.units, shards.options, shard.size());
    });
  }
  if (!filled && present) give_memory(state.tensors.parameters);
  Originals originals;
  if (shards.options.param_dtype && (filled || present))
    originals = narrow(state.tensors, *shards.options.param_dtype, former);
  if (shards.options.buffer_dtype && shards.buffer_dtypes.empty()) {
    shards.buffer_dtypes = convert_buffers(state.tensors, *shards.options.buffer_dtype);
  }
  std::unordered_map<const c10::TensorImpl*, int> unit_of;
  for (size_t unit = 0; unit < shards.units.size(); ++unit) {
    for (const auto& entry : shards.units[unit].parameters) {
      unit_of[entry.tensor.unsafeGetTensorImpl()] = static_cast<int>(unit);
    }
  }
  auto gradients = gradients_of(state.tensors);
  std::vector<int> units;
  std::vector<at::Tensor> parameters;
  for (auto& gradient : gradients) {
    gradient.sparse = false;  // sums lie in flat buffers
    if (shards.options.reduce_dtype) gradient.reduce_dtype = shards.options.reduce_dtype;
    units.push_back(unit_of.at(gradient.parameter.unsafeGetTensorImpl()));
    parameters.push_back(gradient.parameter);
  }
  const bool small = present && shard.size() > 1 && !groups.replicated() && !shards.options.communication_hook;
  const auto caps = unit_caps(small);
  std::unique_ptr<GradientReduction> reduction;
  // Equal ranges need equally many ranks on each host.
  if (shards.options.shard_by_parameter || !groups.equal) {
    std::vector<int> owners(parameters.size(), -1);
    assign_owners(parameters, groups.owners, owners);
    reduction = reduce_units_to_owners(groups, caps, units, owners);
  } else {
    reduction = scatter_units(groups, caps, units);
  }
  reduction = with_hook(std::move(reduction), shards.options.communication_hook, gradients, "FullyShardedDataParallel");
  ReducerOptions reducer_options{
      .leave_grad = false,
      .about_sums =
          "which FullyShardedDataParallel has reduced to shards on the ranks: clip with clip_grad_norm_() of the "
          "wrapper or the optimizer's clip_grad, scale losses by its option scaler (in Python also with "
          "shoal.amp.GradScaler), drop it with zero_grad(), update with FullyShardedOptimizer",
      .accept_unused = true,
      .about_repeats =
          "under no_sync(), call backward(loss_sum, weight) of the wrapper, and after it, outside, backward({}, 0)",
      .limits = bucket_limits(small)};
  // Bounded, because a rank that waits gathers no pages, and the rank it waits for may need it to gather one.
  if (!present) reducer_options.limits.patience = std::chrono::seconds(2);
  state.make_reducer(std::move(gradients), reducer_options, std::move(reduction));
  if (!present) {
    const auto& options = shards.options;
    shards.pager = std::make_shared<Pager>(shard, PagerOptions{.resident = options.unit_limit - options.prefetch_units,
                                                               .ahead = options.prefetch_units,
                                                               .bytes = options.byte_limit,
                                                               .check_order = options.check_unit_order});
  }
  const auto gather = [&](std::vector<at::Tensor> list, const FlatLayout& layout, std::vector<Range> owners,
                          const std::string& name) {
    return present ? gather_in_parameters(shard, std::move(list), layout, std::move(owners), {-1, -1, name})
                   : gather_in_pages(shards.pager, std::move(list), layout, owners, shard.rank(), name, filled);
  };
  auto& reducer = *state.reducer;
  const auto& buckets = reducer.buckets();
  std::vector<std::unique_ptr<ParameterGather>> gathers(buckets.size());
  for (size_t number = 0; number < shards.units.size(); ++number) {
    const auto& unit = shards.units[number];
    const auto name = title(unit);
    std::vector<size_t> of_unit;
    for (size_t bucket = buckets.size(); bucket-- > 0;) {
      if (units[buckets[bucket].members().front()] == static_cast<int>(number)) of_unit.push_back(bucket);
    }
    std::vector<at::Tensor> values;
    for (const auto& entry : unit.parameters) {
      values.push_back(entry.tensor);
      const auto original = originals.frozen.find(entry.tensor.unsafeGetTensorImpl());
      if (original != originals.frozen.end()) values.push_back(original->second);
    }
    for (const auto bucket : of_unit) {
      for (const auto member : buckets[bucket].members()) {
        if (!originals.trainable.empty()) values.push_back(originals.trainable[member]);
      }
    }
    materialize_and_broadcast(groups, std::move(values), shards.options.sync_module_states, name);
    for (const auto bucket : of_unit) {
      gathers[bucket] = gather(buckets.parameters_of(buckets[bucket]), buckets[bucket].layout(),
                               buckets.owners_of(buckets[bucket], shard.size()), name);
      if (!originals.trainable.empty()) keep_own_elements(buckets[bucket], originals.trainable);
    }
    for (auto& list : frozen_of(unit, originals)) {
      std::vector<int64_t> numels;
      std::vector<at::Tensor> tensors;
      for (const auto& entry : list) {
        numels.push_back(entry.tensor.numel());
        tensors.push_back(entry.tensor);
      }
      const auto layout = scatter_layout(numels, tensors.front().element_size(), groups.owners);
      std::vector<Range> owners(static_cast<size_t>(shard.size()));
      for (int rank = 0; rank < groups.owners; ++rank) owners[static_cast<size_t>(rank)] = layout.part(rank);
      auto divided = gather(std::move(tensors), layout, owners, name);
      auto& frozen = shards.frozen.emplace_back(FullyShardedCore::Shards::Frozen{.parameters = std::move(list),
                                                                                 .layout = layout,
                                                                                 .owners = std::move(owners),
                                                                                 .gather = std::move(divided),
                                                                                 .pieces = {},
                                                                                 .copies = {}});
      list_pieces(frozen, shard, present, originals);
      for (const auto& entry : frozen.parameters) originals.frozen.erase(entry.tensor.unsafeGetTensorImpl());
    }
  }
  shards.module =
      std::make_shared<ShardedModule>(shard, state.reducer, std::move(gathers), nullptr, originals.trainable);
  if (shards.options.param_dtype) shards.module->convert_dtypes();
  for (const auto& frozen : shards.frozen) {
    std::vector<std::string> names;
    std::vector<at::Tensor> parameters;
    for (const auto& entry : frozen.parameters) {
      names.push_back(entry.name);
      parameters.push_back(entry.tensor);
    }
    shards.module->add_frozen(std::move(names), std::move(parameters), frozen.gather, frozen.pieces);
  }
  if (!shards.options.sync_module_states) require_equal_replicas(state, shards);
}

}  // namespace shoal
