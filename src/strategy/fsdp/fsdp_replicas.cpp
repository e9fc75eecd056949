// Comparison of ranks that own the same ranges but started with values of their own.

#include <fmt/format.h>
#include <torch/utils.h>

#include "shoal/error.h"
#include "strategy/fsdp/shards.h"

namespace shoal {
namespace {

// Whether this rank's values equal the first replica's. Collective over the replicas.
bool equals_first(const Group& replicas, const at::Tensor& values) {
  auto first = values.detach().clone();
  replicas.broadcast(first, 0, {-1, -1, "parameters of the first replica"}).wait();
  return at::equal(first, values);
}

}  // namespace

void require_equal_replicas(const DataParallelCore::State& state, FullyShardedCore::Shards& shards) {
  const torch::NoGradGuard no_grad;
  if (!shards.groups.replicas || !shards.groups.equal) return;
  const auto& replicas = *shards.groups.replicas;
  const auto& gradients = state.reducer->gradients();
  const auto& parameters = state.tensors.parameters;
  // Index of the first parameter that differs.
  auto differs = at::full({1}, static_cast<int64_t>(parameters.size()), at::kLong);
  const auto compare = [&](const std::string& name, const at::Tensor& values) {
    if (equals_first(replicas, values)) return;
    for (size_t number = 0; number < parameters.size(); ++number) {
      if (parameters[number].name == name) differs.clamp_max_(static_cast<int64_t>(number));
    }
  };
  for (const auto& piece : shards.module->pieces()) {
    compare(gradients[piece.gradient].name, piece.main.detach().as_strided({piece.main.numel()}, {1}));
  }
  for (const auto& frozen : shards.frozen) {
    for (const auto& piece : frozen.pieces) compare(frozen.parameters[piece.slice.piece].name, piece.values());
  }
  shards.groups.all.all_reduce(differs, ReduceOp::min, {-1, -1, "whether replicas are equal"}).wait();
  const auto first = static_cast<size_t>(differs.item<int64_t>());
  if (first == parameters.size()) return;
  throw DisagreeError(fmt::format(
      "FullyShardedDataParallel: with sync_module_states off, ranks that own the same range must start with "
      "the same values, and {} differs; load the same on all ranks, or set sync_module_states",
      parameters[first].name));
}

}  // namespace shoal
