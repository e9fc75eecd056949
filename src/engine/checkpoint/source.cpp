#include "engine/checkpoint/source.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/utils.h>

#include <set>

#include "shoal/error.h"

namespace shoal {

// Waits until no rank reads the old values any more.
void CheckpointSource::begin_load(const CarriedStates&) {
  group().barrier({-1, -1, "before loading"}).wait();
}

void require_parameters_of(const torch::nn::Module& module, const torch::optim::Optimizer& optimizer) {
  std::set<const c10::TensorImpl*> known;
  for (const auto& parameter : module.parameters()) known.insert(parameter.unsafeGetTensorImpl());
  const auto& groups = optimizer.param_groups();
  for (size_t number = 0; number < groups.size(); ++number) {
    for (const auto& parameter : groups[number].params()) {
      if (known.contains(parameter.unsafeGetTensorImpl())) continue;
      throw UsageError(fmt::format(
          "TrainingState: a parameter [{}] of param group {} is not one of the module's, so it has no name by which "
          "it could be saved: register it in the module, or put the modules into one",
          fmt::join(parameter.sizes(), ", "), number));
    }
  }
}

void add_ignored(CheckpointView& view, const torch::nn::Module& module, const ModuleTensors& wrapped,
                 const std::string& prefix) {
  std::set<std::string> theirs;
  for (const auto& share : view.shares) {
    if (share.everywhere) continue;
    for (const auto& piece : share.pieces) theirs.insert(piece.name);
  }
  for (const auto* list : {&wrapped.parameters, &wrapped.buffers}) {
    for (const auto& entry : *list) theirs.insert(prefix + entry.name);
  }
  const auto all = walk(module, {});
  for (const auto* list : {&all.parameters, &all.buffers}) {
    for (const auto& entry : *list) {
      if (!theirs.contains(prefix + entry.name)) view.own.insert(prefix + entry.name);
    }
  }
}

void add_rest(CheckpointView& view, const torch::nn::Module& module, const std::string& prefix) {
  view.modules.emplace_back(&module, prefix);
  std::set<const c10::TensorImpl*> known;
  for (const auto& share : view.shares) {
    for (const auto& piece : share.pieces) known.insert(piece.parameter.unsafeGetTensorImpl());
  }
  const auto tensors = walk(module, {});
  for (const auto* list : {&tensors.parameters, &tensors.buffers}) {
    for (const auto& entry : *list) {
      for (const auto& alias : entry.aliases) view.aliases[prefix + entry.name].push_back(prefix + alias);
    }
  }
  for (const auto& entry : tensors.parameters) {
    view.names.emplace(entry.tensor.unsafeGetTensorImpl(), prefix + entry.name);
    if (known.contains(entry.tensor.unsafeGetTensorImpl())) continue;
    // A save compares frozen parameters where ranks may differ; those that something else trains are each rank's own.
    auto& list = entry.tensor.requires_grad() ? view.buffers : view.rest;
    list.push_back(whole_slice(prefix + entry.name, entry.tensor.detach()));
  }
  for (const auto& entry : tensors.buffers) {
    if (entry.transient) {
      view.transient.push_back(prefix + entry.name);
    } else {
      view.buffers.push_back(whole_slice(prefix + entry.name, entry.tensor));
    }
  }
}

}  // namespace shoal
