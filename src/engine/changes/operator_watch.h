#pragma once
// Observer of operators that use tensors on certain memory.

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <span>
#include <string_view>

namespace shoal {

// Returns a tensor with the same memory, shape and strides whose operators can be observed, as can those of its views
// and of tensors that receive its memory by set_data(). Operators that use such a tensor cost a little more, observed
// or not; others cost nothing extra.
at::Tensor watchable(const at::Tensor& tensor);

// True if operators on the tensor can be observed.
bool is_watchable(const at::Tensor& tensor);

// Interface of observers. They are called for every operator, on any thread, that uses a watchable tensor on memory
// that they watch. An operator may call others with the same tensors, so uses nest. Operators that only create views
// are not reported, nor are accesses past the operators (data_ptr).
class MemoryUser {
 public:
  virtual ~MemoryUser() = default;
  // Called before `op` runs, with all memory of this observer that it uses, each once. If it throws, the operator
  // throws that instead of running. It may block, and may watch and unwatch memory.
  virtual void begin_use(std::string_view /*op*/, std::span<c10::StorageImpl* const> /*memory*/) {}
  // Called instead of begin_use if the operator only zeroes all elements of `memory` (zero_, fill_ with 0). Returns
  // true if the observer has done so; the operator then does nothing.
  virtual bool zero(c10::StorageImpl* memory);
  // Called after begin_use of all observers: `op` will write this memory.
  virtual void before_write(std::string_view /*op*/, c10::StorageImpl* /*memory*/) {}
  // Called after the operator, also after an exception, unless begin_use threw.
  virtual void end_use(std::span<c10::StorageImpl* const> /*memory*/) noexcept {}
};

enum class Watched { all, writes };

// Starts and stops observation. `writes`: only before_write() is called, and operators that only read cost nothing. A
// memory may have several observers. An observer must unwatch before it is destroyed, and not while one of its
// operators runs.
void watch(c10::StorageImpl* storage, MemoryUser& user, Watched what = Watched::all);
void unwatch(c10::StorageImpl* storage, MemoryUser& user);

// True if the tensor's values were provided by an observer that has been destroyed: no operator can read it any more.
bool is_lost(const at::Tensor& tensor);

// Scope in which this thread's operators are not reported.
class UnwatchedOperators {
 public:
  UnwatchedOperators();

 private:
  c10::impl::ExcludeDispatchKeyGuard guard_;
};

}  // namespace shoal
