#pragma once
// Being told before an operator reads or writes certain memory, whoever calls it.

#include <torch/types.h>

#include <functional>
#include <unordered_map>

namespace shoal {

// Calls `touched(i)` before any operator on any thread runs with a tensor on the i-th memory among its inputs, once per
// arming. Costs something for every operator of the process while it is armed for any memory, nothing otherwise. Memory
// that is read past the operators (data_ptr) is not seen. (at::RecordFunction, as libtorch's profilers use it.)
class FirstTouch {
 public:
  explicit FirstTouch(std::function<void(size_t)> touched) : touched_(std::move(touched)) {}
  ~FirstTouch();
  FirstTouch(const FirstTouch&) = delete;
  FirstTouch& operator=(const FirstTouch&) = delete;

  void arm(size_t index, const at::Tensor& memory);
  // As if all of it were touched now.
  void touch_all();

 private:
  friend struct TouchWatch;
  void touch(const void* storage);

  std::function<void(size_t)> touched_;
  std::unordered_map<const void*, size_t> armed_;  // by storage
};

}  // namespace shoal
