#include "engine/wrapper/module_checks.h"

#include <ATen/MemoryOverlap.h>
#include <fmt/format.h>

#include "engine/changes/operator_watch.h"
#include "engine/gradients/forward_turns.h"
#include "shoal/deferred_init.h"
#include "shoal/error.h"

namespace shoal {

void require_usable(const at::Tensor& tensor, const std::string& name, const std::string& owner) {
  const auto refuse = [&](const char* fault) { throw UsageError(fmt::format("{}: {} {}", owner, name, fault)); };
  if (tensor.is_meta()) {
    refuse(
        "is on the meta device, which is not supported: construct the module in a DeferredInit scope, in Python on the "
        "CPU, or call to_empty(device=\"cpu\") and initialise it");
  }
  if (is_lost(tensor)) {
    refuse(
        "has no values: it was sharded by a FullyShardedDataParallel that has been destroyed; call its unwrap() "
        "before");
  }
  if (tensor.layout() != at::kStrided) {
    refuse("is sparse, which is not supported: hold it as a dense tensor, or let the wrapper ignore it");
  }
  if (!is_deferred(tensor) && at::has_internal_overlap(tensor) == at::MemOverlap::Yes) {
    refuse("has several elements in one place of memory (expand()), which cannot be written: make it contiguous()");
  }
}

void require_usable(const ModuleTensors& tensors, const std::string& wrapper, OtherWrappers other_wrappers) {
  for (const auto& entry : tensors.parameters) require_usable(entry.tensor, "parameter " + entry.name, wrapper);
  for (const auto& entry : tensors.buffers) require_usable(entry.tensor, "buffer " + entry.name, wrapper);
  for (const auto& entry : tensors.trainable()) {
    if (!ForwardTurns::are_taken(entry.tensor, other_wrappers == OtherWrappers::allowed)) continue;
    throw UsageError(fmt::format(
        "{}: parameter {} is in another wrapper, which is still in use: destroy that one first, or give the networks "
        "that share the parameter to one wrapper, as parts of one module",
        wrapper, entry.name));
  }
}

void require_constant_in_forward(const ModuleTensors& tensors, const std::string& wrapper) {
  for (const auto& entry : tensors.parameters) {
    if (!entry.changes_in_forward) continue;
    throw UsageError(
        fmt::format("{}: {} is of an embedding with max_norm, whose forward changes the rows that this rank looks up, "
                    "so that ranks would no longer hold the same parameters: leave max_norm out, and after each step() "
                    "call weight.data().renorm_(2, 0, max_norm) on all ranks",
                    wrapper, entry.name));
  }
}

}  // namespace shoal
