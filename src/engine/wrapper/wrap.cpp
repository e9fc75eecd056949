// Start of a wrapper: the module's tensors, alike on all ranks.

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "engine/changes/operator_watch.h"
#include "engine/wrapper/data_parallel_state.h"
#include "engine/wrapper/module_checks.h"
#include "module/sync.h"
#include "shoal/deferred_init.h"
#include "shoal/error.h"
#include "shoal/group.h"

namespace shoal {
namespace {

std::vector<at::Tensor> all_but(const torch::nn::Module& module, const std::vector<NamedTensor>& excepted) {
  auto list = module.buffers();
  for (const auto& parameter : module.parameters()) {
    const bool out = std::any_of(excepted.begin(), excepted.end(),
                                 [&](const NamedTensor& entry) { return entry.tensor.is_same(parameter); });
    if (!out) list.push_back(parameter);
  }
  return list;
}

}  // namespace

std::vector<Gradient> gradients_of(const ModuleTensors& tensors) {
  std::vector<Gradient> gradients;
  for (const auto& entry : tensors.trainable()) gradients.push_back({entry.name, entry.tensor, entry.sparse_gradient});
  return gradients;
}

void widen(std::vector<Gradient>& gradients) {
  for (auto& gradient : gradients) {
    const bool narrow = c10::elementSize(gradient.dtype()) < sizeof(float);
    if (narrow && !gradient.sparse) gradient.reduce_dtype = at::kFloat;
  }
}

std::unique_ptr<DataParallelCore::State> wrap(std::shared_ptr<torch::nn::Module> module, const Group& group,
                                              const std::string& name, const std::vector<std::string>& ignored,
                                              bool sync, Deferred deferred, OtherWrappers other_wrappers) {
  if (!module) throw UsageError(fmt::format("{}: the module is nullptr", name));
  auto tensors = walk(*module, ignored);
  require_usable(tensors, name, other_wrappers);
  materialize(all_but(*module, deferred == Deferred::keep ? tensors.parameters : std::vector<NamedTensor>()));
  if (sync) {
    const UnwatchedOperators own;  // rank 0's values are written to sharded parameters' memory without gathering
    sync_module(group, tensors);
  } else {
    agree(group, "the model", tensors.describe());
  }
  if (tensors.trainable().empty()) {
    throw UsageError(fmt::format("{}: no parameter of the module requires a gradient", name));
  }
  std::vector<at::Tensor> parameters;
  for (const auto& entry : tensors.parameters) parameters.push_back(entry.tensor);
  KnownModule known(module, name);
  return std::make_unique<DataParallelCore::State>(
      DataParallelCore::State{.name = name,
                              .module = std::move(module),
                              .group = group,
                              .synchronized = sync,
                              .tensors = std::move(tensors),
                              .known = std::move(known),
                              .watch = ParameterWatch(std::move(parameters))});
}

}  // namespace shoal
