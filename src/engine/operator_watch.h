#pragma once
// Being told which operators take tensors on certain memory, whoever calls them.

#include <c10/core/StorageImpl.h>

namespace shoal {

// Told of every operator, on any thread, that takes a tensor on memory it watches. An operator may call others with the
// same tensors, so uses nest. Memory that is read past the operators (data_ptr) is not seen. (at::RecordFunction, as
// libtorch's profilers use it.)
class MemoryUser {
 public:
  virtual ~MemoryUser() = default;
  // Before the operator runs; true: end_use is wanted. May take long, and may watch and unwatch memory. Must not throw:
  // libtorch drops what callbacks throw and runs the operator all the same.
  virtual bool begin_use(c10::StorageImpl* storage) noexcept = 0;
  // After it, also after an exception.
  virtual void end_use(c10::StorageImpl* storage) noexcept = 0;
};

// While any memory is watched, every operator of the process costs a look at its tensors; otherwise nothing. The user
// must have unwatched before it goes. Not while one of its operators runs.
void watch(c10::StorageImpl* storage, MemoryUser& user);
void unwatch(c10::StorageImpl* storage);

}  // namespace shoal
