#pragma once
// Values of parameters before param_dtype rounded them.

#include <unordered_map>
#include <vector>

#include "strategy/fsdp/shards.h"

namespace shoal {

struct Originals {
  std::vector<at::Tensor> trainable;                              // by gradient
  std::unordered_map<const c10::TensorImpl*, at::Tensor> frozen;  // those that were converted

  // Whether a frozen parameter gets a float32 copy.
  bool copied(const at::Tensor& parameter) const;
};

// Converts parameters to another dtype; returns their original values. former: frozen parameters of an elastic job,
// which were converted before and have copies of the originals.
Originals narrow(const ModuleTensors& tensors, at::ScalarType dtype,
                 const std::vector<FullyShardedCore::Shards::Frozen>& former);

// Keeps only this rank's elements of the originals of a bucket's parameters.
void keep_own_elements(const Bucket& bucket, std::vector<at::Tensor>& originals);

// Lists this rank's pieces of frozen parameters, with their originals in float32 if they were converted to a
// narrower dtype, either all or none. present: parameters are always in memory. Collective.
void list_pieces(FullyShardedCore::Shards::Frozen& frozen, const Group& shard, bool present,
                 const Originals& originals);

}  // namespace shoal
