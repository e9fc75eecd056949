#pragma once
// Registry of the tensors that some FullyShardedDataParallel of this process has sharded, so that no other one shards
// them.

#include <torch/nn/module.h>

#include <optional>
#include <unordered_set>

namespace shoal {

class FullyShardedCore;

struct Taken {
  FullyShardedCore* by = nullptr;
  const torch::nn::Module* module = nullptr;  // which that one wraps
  bool ignored = false;                       // it was told to leave the tensor alone; else it is its own
};

// All are thread-safe. A tensor that one wrapper ignores may be another one's own.
std::optional<Taken> taken(const at::Tensor& tensor);
void take(const at::Tensor& tensor, const Taken& taken);
void give_back_all_of(const FullyShardedCore& wrapper);

// A module and all its sub-modules.
using ModuleSet = std::unordered_set<const torch::nn::Module*>;
ModuleSet parts_of(const torch::nn::Module& module);
// What wrappers of these modules have taken; nothing where another one has.
std::optional<Taken> taken_within(const at::Tensor& tensor, const ModuleSet& modules);

}  // namespace shoal
