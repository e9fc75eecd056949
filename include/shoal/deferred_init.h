#pragma once
// Modules that are built without memory for their tensors, and get it part by part (after torchdistX's deferred_init).

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/types.h>

#include <vector>

namespace shoal {

// While it lives, tensors that this thread makes have no memory, and what is done to them is written down:
//
//   std::shared_ptr<Gpt> model;
//   {
//     const shoal::DeferredInit no_memory;
//     model = std::make_shared<Gpt>(options);  // any module, unmodified
//   }
//   shoal::FullyShardedDataParallel parallel(model, world.group(), ...);  // unit by unit
//
// Strategies give the parameters memory and the values that the constructors would have, FullyShardedDataParallel unit
// by unit, so that no rank ever holds the whole model. Random numbers are drawn then, part by part and in the order of
// construction within a part. Tensors that were there before take part as usual. Operators whose result is no tensor
// (item(), equal()) and accesses past the operators (data_ptr(), torch::tensor(std::vector)) find no values: UsageError
// and c10::Error that say so. Outside the scope such a tensor can only be viewed until it is materialized. Not
// collective. Scopes may nest; they end on the thread that began them.
class DeferredInit {
 public:
  DeferredInit();
  DeferredInit(const DeferredInit&) = delete;
  DeferredInit& operator=(const DeferredInit&) = delete;

 private:
  c10::impl::IncludeDispatchKeyGuard guard_;
};

// Whether it was made in such a scope and has no memory yet.
bool is_deferred(const at::Tensor& tensor);

// Gives those of these tensors that are deferred, and their views, memory and values; the others are left alone.
// Thread-safe.
void materialize(const std::vector<at::Tensor>& tensors);

}  // namespace shoal
