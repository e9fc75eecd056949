#pragma once
// Being told before an operator first takes certain memory.

#include <torch/types.h>

#include <functional>
#include <mutex>
#include <string>
#include <unordered_map>

#include "engine/paging/operator_watch.h"

namespace shoal {

// Calls `touched(i)` before any operator on any thread runs with a watchable tensor (operator_watch.h) on the i-th
// memory among its inputs, once per arming. The i-th memory may be several storages, and a storage may belong to
// several: one touch counts for all. What it throws, the operator throws, or touch_all().
//
// Whoever reads an armed tensor past the operators (data_ptr(), torch::save) gets libtorch's error with the text that
// arm() was given: until the first touch the storage has no pointer.
class FirstTouch : private MemoryUser {
 public:
  explicit FirstTouch(std::function<void(size_t)> touched) : touched_(std::move(touched)) {}
  ~FirstTouch() override;
  FirstTouch(const FirstTouch&) = delete;
  FirstTouch& operator=(const FirstTouch&) = delete;

  // Adds the tensor's storage to the index-th memory; about: why there is no pointer, and what to do.
  void arm(size_t index, const at::Tensor& memory, const std::string& about);
  // As if all of it were touched now.
  void touch_all();

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
