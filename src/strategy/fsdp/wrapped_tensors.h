#pragma once
// Registry of the tensors that some FullyShardedDataParallel in this process has sharded or ignored, so that no other
// one shards them.

#include <torch/nn/module.h>

#include <optional>
#include <unordered_set>

namespace shoal {

class FullyShardedCore;

struct Registration {
  FullyShardedCore* by = nullptr;
  const torch::nn::Module* module = nullptr;  // the module that the wrapper wraps
  bool ignored = false;                       // the wrapper ignores the tensor; else it has sharded it
};

// All functions are thread-safe. A tensor that one wrapper ignores may be sharded by another.
std::optional<Registration> find_registration(const at::Tensor& tensor);
void register_tensor(const at::Tensor& tensor, const Registration& registration);
void unregister_all(const FullyShardedCore& wrapper);

// A module and all its submodules.
using ModuleSet = std::unordered_set<const torch::nn::Module*>;
ModuleSet parts_of(const torch::nn::Module& module);
// The registration by a wrapper of one of these modules; nothing if another wrapper registered the tensor.
std::optional<Registration> find_registration_within(const at::Tensor& tensor, const ModuleSet& modules);

}  // namespace shoal
