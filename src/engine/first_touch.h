#pragma once
// Being told before an operator first takes certain memory.

#include <torch/types.h>

#include <functional>
#include <mutex>
#include <unordered_map>

#include "engine/operator_watch.h"

namespace shoal {

// Calls `touched(i)` before any operator on any thread runs with a tensor on the i-th memory among its inputs, once per
// arming. The i-th memory may be several storages, and a storage may belong to several: one touch counts for all. What
// it throws, the next call of touch_all() or check() throws; the operator runs all the same.
class FirstTouch : private MemoryUser {
 public:
  explicit FirstTouch(std::function<void(size_t)> touched) : touched_(std::move(touched)) {}
  ~FirstTouch() override;
  FirstTouch(const FirstTouch&) = delete;
  FirstTouch& operator=(const FirstTouch&) = delete;

  // Adds the tensor's storage to the index-th memory.
  void arm(size_t index, const at::Tensor& memory);
  // As if all of it were touched now.
  void touch_all();
  // Throws what a touch by an operator has left.
  void check();

 private:
  bool begin_use(c10::StorageImpl* storage) noexcept override;
  void end_use(c10::StorageImpl*) noexcept override {}
  void touch(c10::StorageImpl* storage);

  std::function<void(size_t)> touched_;
  std::mutex mutex_;
  std::unordered_multimap<c10::StorageImpl*, size_t> armed_;
  std::exception_ptr error_;
};

}  // namespace shoal
