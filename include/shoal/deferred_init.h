#pragma once
// Deferred initialisation: modules constructed without memory and materialized part by part (after torchdistX's
// deferred_init).

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/types.h>

#include <vector>

namespace shoal {

// Scope in which tensors created by this thread have no memory; operations on them are recorded and replayed later.
//
//   std::shared_ptr<Gpt> model;
//   {
//     const shoal::DeferredInit no_memory;
//     model = std::make_shared<Gpt>(options);  // any module, unmodified
//   }
//   shoal::FullyShardedDataParallel parallel(model, world.group(), ...);  // materializes one unit at a time
//
// Strategies materialize the parameters with the values that the constructors would have given them;
// FullyShardedDataParallel does it unit by unit, so that no rank ever holds the full model. Random numbers are drawn at
// that time, part by part, in the order of construction within a part. Tensors that existed before take part as usual,
// with the values that they have in the scope: an operator that is recorded keeps a copy of them. An operator
// without a kernel for the meta device in libtorch runs on zeros, for the shape of its result. If that depends on
// values, or the operator draws random numbers, it runs at once if no tensor is among its arguments (randperm()), and
// throws UsageError otherwise (nonzero(), multinomial()). Operators whose result is not a tensor
// (item(), equal()) throw UsageError, and accesses past the operators (data_ptr(), torch::tensor(std::vector))
// c10::Error, because there are no values. Outside the scope, a deferred tensor can only be viewed until it is
// materialized. Scopes may nest and must end on the thread that began them. Not collective.
class DeferredInit {
 public:
  DeferredInit();
  DeferredInit(const DeferredInit&) = delete;
  DeferredInit& operator=(const DeferredInit&) = delete;

 private:
  c10::impl::IncludeDispatchKeyGuard guard_;
};

// True if the tensor was created in a DeferredInit scope and is not materialized yet.
bool is_deferred(const at::Tensor& tensor);

// Allocates and initialises the deferred ones among these tensors, and their views; other tensors are unchanged.
// Thread-safe.
void materialize(const std::vector<at::Tensor>& tensors);

}  // namespace shoal
