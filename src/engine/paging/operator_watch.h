#pragma once
// Being told which operators take tensors on certain memory, whoever calls them.

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <span>
#include <string_view>

namespace shoal {

// The same memory, shape and strides under a tensor whose operators can be watched. So can those of all its views, and
// of tensors that get it by set_data(). Every operator that takes one of them costs a little more, watched or not;
// others cost nothing.
at::Tensor watchable(const at::Tensor& tensor);

// Whether a tensor is one, so that what operators do to its memory can be seen.
bool is_watchable(const at::Tensor& tensor);

// Told of every operator, on any thread, that takes a watchable tensor on memory it watches. An operator may call
// others with the same tensors, so uses nest. Operators that only make views are not told of, nor is memory that is
// read or written past the operators (data_ptr).
class MemoryUser {
 public:
  virtual ~MemoryUser() = default;
  // Before `op` runs, with all memory of this user that it takes, each once. What this throws, the operator throws
  // instead of running. May take long, and may watch and unwatch memory.
  virtual void begin_use(std::string_view /*op*/, std::span<c10::StorageImpl* const> /*memory*/) {}
  // Instead of begin_use where the operator only zeroes all elements of `memory` (zero_, fill_ with 0): true where the
  // user has done it, so that the operator does nothing.
  virtual bool zero(c10::StorageImpl* memory);
  // After all users' begin_use: `op` will write this memory.
  virtual void before_write(std::string_view /*op*/, c10::StorageImpl* /*memory*/) {}
  // After begin_use and the operator, also after an exception, unless begin_use threw.
  virtual void end_use(std::span<c10::StorageImpl* const> /*memory*/) noexcept {}
};

enum class Watched { all, writes };

// `writes`: the user gets before_write() alone, and operators that only read cost it nothing. A memory may have several
// users. The user must have unwatched before it goes. Not while one of its operators runs.
void watch(c10::StorageImpl* storage, MemoryUser& user, Watched what = Watched::all);
void unwatch(c10::StorageImpl* storage, MemoryUser& user);

// Whether the tensor's values were a user's to bring, and that user has gone: no operator can read it any more.
bool is_lost(const at::Tensor& tensor);

// While it lives, nobody is told of this thread's operators.
class UnwatchedOperators {
 public:
  UnwatchedOperators();

 private:
  c10::impl::ExcludeDispatchKeyGuard guard_;
};

}  // namespace shoal
