#include "strategy/megatron/declared_gradients.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/utils.h>

#include <algorithm>

#include "memory/views.h"
#include "shoal/error.h"
#include "shoal/group.h"

namespace shoal {

void DeclaredGradients::add(std::vector<ChunkParameter> parameters, const Group& group, const std::string& name) {
  std::vector<std::string> shapes;
  std::vector<const c10::TensorImpl*> seen;
  for (const auto& declared : declared_) {
    if (declared.group.name() != group.name()) continue;
    for (const auto& parameter : declared.parameters) {
      seen.push_back(parameter.about().parameter.unsafeGetTensorImpl());
    }
  }
  for (const auto& entry : parameters) {
    const auto& parameter = entry.about().parameter;
    if (std::count(seen.begin(), seen.end(), parameter.unsafeGetTensorImpl()) > 0) {
      throw UsageError(
          fmt::format("DistributedOptimizer: all_reduce_grads: the gradient of {} is declared twice for the same group "
                      "and would be summed twice; declare it once",
                      entry.about().name));
    }
    seen.push_back(parameter.unsafeGetTensorImpl());
    shapes.push_back(fmt::format("{} [{}] strides [{}]", c10::toString(entry.about().dtype()),
                                 fmt::join(parameter.sizes(), ", "), fmt::join(parameter.strides(), ", ")));
  }
  agree(group, fmt::format("the {} gradients of all_reduce_grads", name), shapes);
  declared_.push_back({std::move(parameters), group, name + " gradients", name + "-grads-all-reduce"});
}

bool DeclaredGradients::sum_up(const ShardedOptimizerCore::State& state, bool failed) const {
  for (const auto& declared : declared_) {
    state.time(
        declared.timer.c_str(), 1, [&] { failed = sum_up(declared, state.label(declared.what), failed); },
        &declared.group);
  }
  return failed;
}

bool DeclaredGradients::sum_up(const Declared& declared, const Label& label, bool failed) {
  const torch::NoGradGuard no_grad;
  const auto count = static_cast<int64_t>(declared.parameters.size());
  auto flags = at::zeros({count + 1}, at::kInt);  // who is used, and whether a rank has failed
  auto* flag = flags.data_ptr<int>();
  for (int64_t i = 0; i < count; ++i) {
    const auto& [chunk, gradient] = declared.parameters[i];
    flag[i] = chunk->reducer().used_here(gradient) ? 1 : 0;
  }
  flag[count] = failed ? 1 : 0;
  declared.group.all_reduce(flags, ReduceOp::max, label).wait();
  if (flag[count] != 0) return true;
  for (int64_t i = 0; i < count; ++i) {
    if (flag[i] == 0) continue;
    const auto& [chunk, gradient] = declared.parameters[i];
    // Channels-last gradients are not contiguous, but dense; ranks agree on the layout.
    declared.group.all_reduce(in_memory_order(chunk->reducer().local_gradient(gradient)), ReduceOp::sum, label).wait();
  }
  return false;
}

}  // namespace shoal
