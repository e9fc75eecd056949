#pragma once
// Registry of the tensors that some FullyShardedDataParallel in this process has sharded or ignored, so that no other
// one shards them.

#include <torch/nn/module.h>

#include <optional>
#include <unordered_set>

namespace shoal {

class FullyShardedCore;

struct Taken {
  FullyShardedCore* by = nullptr;
  const torch::nn::Module* module = nullptr;  // the module that the wrapper wraps
  bool ignored = false;                       // the wrapper ignores the tensor; else it has sharded it
};

// All functions are thread-safe. A tensor that one wrapper ignores may be sharded by another.
std::optional<Taken> taken(const at::Tensor& tensor);
void take(const at::Tensor& tensor, const Taken& taken);
void give_back_all_of(const FullyShardedCore& wrapper);

// A module and all its submodules.
using ModuleSet = std::unordered_set<const torch::nn::Module*>;
ModuleSet parts_of(const torch::nn::Module& module);
// The registration by a wrapper of one of these modules; nothing if another wrapper registered the tensor.
std::optional<Taken> taken_within(const at::Tensor& tensor, const ModuleSet& modules);

}  // namespace shoal
