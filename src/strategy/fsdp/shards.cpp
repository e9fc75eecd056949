#include "strategy/fsdp/shards.h"

#include <fmt/format.h>
#include <torch/utils.h>

#include <limits>
#include <map>
#include <numeric>
#include <unordered_map>

#include "engine/ownership.h"
#include "shoal/base/error.h"
#include "shoal/comm/agree.h"

namespace shoal {

ShardGroups make_shard_groups(const Group& group, const FullyShardedDataParallelOptions& options) {
  const auto strategy = options.sharding_strategy;
  int size = group.size();
  if (strategy == ShardingStrategy::no_shard) {
    size = 1;
  } else if (strategy == ShardingStrategy::hybrid_shard || strategy == ShardingStrategy::hybrid_shard_grad_op) {
    size = options.shard_size ? *options.shard_size : group.by_host().size();
    agree(group, "the ranks that divide a model among them", {std::to_string(size)});
    if (group.size() % size != 0) {
      throw UsageError(fmt::format(
          "FullyShardedDataParallel: {} ranks are not a multiple of the {} that divide a model among them; set "
          "shard_size",
          group.size(), size));
    }
  }
  if (size == group.size()) return {.all = group, .shard = group};
  std::vector<int> shard(size);
  std::iota(shard.begin(), shard.end(), group.rank() / size * size);
  std::vector<int> replicas;
  for (int rank = group.rank() % size; rank < group.size(); rank += size) replicas.push_back(rank);
  auto divided = group.subgroup(shard);
  return {.all = group, .shard = std::move(divided), .replicas = group.subgroup(replicas)};
}

namespace {

void check(const ModuleTensors& tensors) {
  const auto device = tensors.parameters.front().tensor.device();
  for (const auto& entry : tensors.parameters) {
    if (!entry.tensor.is_floating_point()) {
      throw UsageError(
          fmt::format("FullyShardedDataParallel: parameter {} is {}; only floating-point parameters can be divided: "
                      "make it a buffer, or ignore it",
                      entry.name, c10::toString(entry.tensor.scalar_type())));
    }
    if (entry.tensor.device() != device) {
      throw UsageError(fmt::format("FullyShardedDataParallel: parameter {} is on {}, {} on {}; move the module to one",
                                   entry.name, entry.tensor.device().str(), tensors.parameters.front().name,
                                   device.str()));
    }
  }
}

// Gives parameters another dtype; returns what they were, by number of the trainable one.
std::vector<at::Tensor> narrow(const ModuleTensors& tensors, at::ScalarType dtype) {
  std::vector<at::Tensor> originals;
  for (const auto& entry : tensors.parameters) {
    if (entry.tensor.requires_grad()) originals.push_back(entry.tensor.detach());
    at::Tensor(entry.tensor).set_data(entry.tensor.detach().to(dtype));
  }
  return originals;
}

std::string title(const Unit& unit) {
  return "unit " + (unit.name.empty() ? unit.parameters.front().name : unit.name);
}

// A unit's frozen parameters of one dtype.
std::vector<std::vector<at::Tensor>> frozen_of(const Unit& unit) {
  std::map<at::ScalarType, std::vector<at::Tensor>> kinds;
  for (const auto& entry : unit.parameters) {
    if (!entry.tensor.requires_grad()) kinds[entry.tensor.scalar_type()].push_back(entry.tensor);
  }
  std::vector<std::vector<at::Tensor>> lists;
  for (auto& [dtype, list] : kinds) lists.push_back(std::move(list));
  return lists;
}

}  // namespace

void divide_parameters(DataParallelCore::State& state, FullyShardedCore::Shards& shards) {
  const torch::NoGradGuard no_grad;
  const auto& groups = shards.groups;
  const auto& shard = groups.shard;
  check(state.tensors);
  std::vector<at::Tensor> originals;
  if (shards.options.param_dtype) originals = narrow(state.tensors, *shards.options.param_dtype);
  shards.units = divide(*state.module, state.tensors, shards.options.auto_wrap_policy);
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
    gradient.sparse = false;  // sums lie in flat memory
    if (shards.options.reduce_dtype) gradient.travels_as = shards.options.reduce_dtype;
    units.push_back(unit_of.at(gradient.parameter.unsafeGetTensorImpl()));
    parameters.push_back(gradient.parameter);
  }
  std::unique_ptr<Exchange> exchange;
  if (shards.options.whole_parameters) {
    std::vector<int> owners(parameters.size(), -1);
    assign_owners(parameters, shard.size(), owners);
    exchange = std::make_unique<ReduceUnitsToOwners>(groups, units, owners);
  } else {
    exchange = std::make_unique<ScatterUnits>(groups, units);
  }
  // Parameters that ranks share are always there; so are all of a rank's own.
  const bool present = shard.size() == 1 || (shard.transport() == "host" && parameters.front().is_cpu());
  // Ranks that gather pages together cannot run ahead of each other, and must not wait for anything else meanwhile.
  constexpr auto unlimited = std::numeric_limits<size_t>::max();
  state.make_reducer(std::move(gradients),
                     {.leave_grad = false, .accept_unused = true, .buckets_in_flight = present ? 4 : unlimited},
                     std::move(exchange));
  if (!present) {
    const auto& options = shards.options;
    shards.pager = std::make_shared<Pager>(
        shard, PagerOptions{.resident = options.unit_limit - options.prefetch_units, .ahead = options.prefetch_units});
  }
  const auto gather = [&](std::vector<at::Tensor> list, const FlatLayout& layout, std::vector<Range> owners,
                          const std::string& name) {
    return present ? gather_in_parameters(shard, std::move(list), layout, std::move(owners), {-1, -1, name})
                   : gather_in_pages(shards.pager, std::move(list), layout, std::move(owners), shard.rank(), name);
  };
  auto& reducer = *state.reducer;
  std::vector<std::unique_ptr<ParameterGather>> gathers;
  for (const auto& bucket : reducer.buckets()) {
    gathers.push_back(gather(reducer.parameters_of(bucket), bucket.layout(), reducer.owners_of(bucket, shard.size()),
                             title(shards.units[units[bucket.members().front()]])));
  }
  shards.module = std::make_shared<ShardedModule>(shard, state.reducer, std::move(gathers), nullptr, originals);
  for (const auto& unit : shards.units) {
    for (auto& list : frozen_of(unit)) {
      std::vector<int64_t> numels;
      for (const auto& parameter : list) numels.push_back(parameter.numel());
      const auto layout = scatter_layout(numels, list.front().element_size(), shard.size());
      std::vector<Range> owners;
      for (int rank = 0; rank < shard.size(); ++rank) owners.push_back(layout.part(rank));
      shards.frozen.push_back(gather(std::move(list), layout, std::move(owners), title(unit) + " (frozen)"));
    }
  }
}

}  // namespace shoal
