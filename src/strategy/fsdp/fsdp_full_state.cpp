// Full parameters and buffers, by name, assembled from the ranks' shards.

#include <torch/utils.h>

#include "engine/changes/outside_inference_mode.h"
#include "memory/views.h"
#include "shoal/group.h"
#include "strategy/fsdp/shards.h"

namespace shoal {

at::Tensor FullyShardedCore::whole(const at::Tensor& parameter, const std::string& name) const {
  if (!has_copy(parameter)) return parameter.detach().clone();
  auto value = shards_->assemble_exact(parameter, name);
  if (shards_->holds(name)) take_written(in_memory_order(parameter.detach()), in_memory_order(value));
  return value;
}

at::Tensor FullyShardedCore::Shards::assemble_exact(const at::Tensor& parameter, const std::string& name) const {
  for (const auto& list : frozen) {
    for (size_t number = 0; number < list.parameters.size(); ++number) {
      if (!list.parameters[number].tensor.is_same(parameter)) continue;
      if (!list.copies.defined()) return parameter.detach().clone();
      return assemble(parameter, at::kFloat, name, [&](const at::Tensor& flat) {
        for (const auto& piece : list.pieces) {
          if (piece.slice.piece != number) continue;
          flat.narrow(0, piece.slice.in_piece.begin, piece.slice.in_piece.size()).copy_(list.current(piece));
        }
      });
    }
  }
  return assemble(parameter, at::kFloat, name, [this](const OwnedPiece& piece) { return module->current(piece); });
}

at::Tensor FullyShardedCore::Shards::assemble(const at::Tensor& parameter, at::ScalarType dtype,
                                              const std::string& name,
                                              const std::function<void(const at::Tensor& flat)>& write_own) const {
  auto sum = at::empty_strided(parameter.sizes(), dense_strides(parameter),
                               parameter.options().dtype(dtype).requires_grad(false))
                 .zero_();
  auto flat = in_memory_order(sum);
  write_own(flat);
  module->shard().all_reduce(flat, ReduceOp::sum, {-1, -1, name}).wait();
  return sum;
}

at::Tensor FullyShardedCore::Shards::assemble(const at::Tensor& parameter, at::ScalarType dtype,
                                              const std::string& name,
                                              const std::function<at::Tensor(const OwnedPiece&)>& of) const {
  return assemble(parameter, dtype, name, [&](const at::Tensor& flat) {
    for (const auto& piece : module->pieces()) {
      if (!module->reducer().gradients()[piece.gradient].parameter.is_same(parameter)) continue;
      flat.narrow(0, piece.slice.in_piece.begin, piece.slice.in_piece.size()).copy_(in_memory_order(of(piece)));
    }
  });
}

void FullyShardedCore::visit_full_state(std::optional<int> recipient, const StateVisitor& visit) const {
  const OutsideInferenceMode outside;
  const torch::NoGradGuard no_grad;
  shards_->module->agree_on_changes({steps(), -1, "replaced parameters"});
  const auto& tensors = state().tensors;
  const bool here = !recipient || *recipient == shards_->groups.all.rank();
  std::exception_ptr error;
  const auto show = [&](const NamedTensor& entry, const at::Tensor& value) {
    if (!here || error) return;
    try {
      visit(entry.name, value);
      for (const auto& alias : entry.aliases) visit(alias, value);
    } catch (...) {
      error = std::current_exception();
    }
  };
  for (const auto& entry : tensors.parameters) show(entry, whole(entry.tensor, entry.name));
  for (size_t number = 0; number < tensors.buffers.size(); ++number) {
    const auto& buffer = tensors.buffers[number].tensor;
    const auto dtype = shards_->buffer_dtypes.empty() ? buffer.scalar_type() : shards_->buffer_dtypes[number].second;
    show(tensors.buffers[number], buffer.detach().to(dtype, /*non_blocking=*/false, /*copy=*/true));
  }
  if (error) std::rethrow_exception(error);
}

std::map<std::string, at::Tensor> FullyShardedCore::full_state_dict(std::optional<int> recipient) const {
  std::map<std::string, at::Tensor> named;
  visit_full_state(recipient, [&](const std::string& name, const at::Tensor& value) { named[name] = value; });
  return named;
}

}  // namespace shoal
