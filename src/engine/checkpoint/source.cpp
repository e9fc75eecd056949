#include "engine/checkpoint/source.h"

#include <torch/utils.h>

#include <set>

#include "module/walk.h"

namespace shoal {

// Waits until no rank reads the old values any more.
void CheckpointSource::begin_load(const CarriedStates&) {
  group().barrier({-1, -1, "before loading"}).wait();
}

void add_rest(CheckpointView& view, const torch::nn::Module& module, const std::string& prefix) {
  std::set<const c10::TensorImpl*> known;
  for (const auto& share : view.shares) {
    for (const auto& piece : share.pieces) known.insert(piece.parameter.unsafeGetTensorImpl());
  }
  const auto tensors = walk(module, {});
  for (const auto& entry : tensors.parameters) {
    if (known.contains(entry.tensor.unsafeGetTensorImpl())) continue;
    // Frozen parameters are equal on all ranks; those that something else trains may differ.
    auto& list = entry.tensor.requires_grad() ? view.buffers : view.rest;
    list.push_back(whole_slice(prefix + entry.name, entry.tensor.detach()));
  }
  for (const auto& entry : tensors.buffers) view.buffers.push_back(whole_slice(prefix + entry.name, entry.tensor));
}

}  // namespace shoal
