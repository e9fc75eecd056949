#pragma once
// Detector of the first operator that uses certain memory.

#include <torch/types.h>

#include <functional>
#include <mutex>
#include <string>
#include <unordered_map>

#include "engine/changes/operator_watch.h"

namespace shoal {

// Calls `touched(i)` before any operator, on any thread, first takes a watchable tensor (operator_watch.h) on the i-th
// memory; once per arming. A memory may consist of several storages, and a storage may belong to several memories: one
// touch counts for all of them. An exception of `touched` is thrown by the operator, or by touch_all().
//
// Access past the operators (data_ptr(), torch::save) to an armed tensor throws libtorch's error with the text given to
// arm(), because the storage has no pointer until the first touch.
class FirstTouch : private MemoryUser {
 public:
  explicit FirstTouch(std::function<void(size_t)> touched) : touched_(std::move(touched)) {}
  ~FirstTouch() override;
  FirstTouch(const FirstTouch&) = delete;
  FirstTouch& operator=(const FirstTouch&) = delete;

  // Adds the tensor's storage to the index-th memory. about: error text that says why there is no pointer, and what to
  // do.
  void arm(size_t index, const at::Tensor& memory, const std::string& about);
  // Touches all armed memory.
  void touch_all();
  // All memory is as if it had not been armed: `touched` is not called.
  void disarm();

 private:
  void begin_use(std::string_view op, std::span<c10::StorageImpl* const> memory) override;
  void touch(c10::StorageImpl* storage);
  void give_pointer(c10::StorageImpl* storage);

  std::function<void(size_t)> touched_;
  std::mutex mutex_;
  std::unordered_map<c10::StorageImpl*, c10::DataPtr> pointers_;  // of armed storages
  std::unordered_multimap<c10::StorageImpl*, size_t> armed_;
};

}  // namespace shoal
