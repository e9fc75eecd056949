#pragma once
// Operators that a DeferredInit scope has recorded, and storages that have no memory until these run.

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/types.h>

#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace shoal {

// Dispatch key of the scope, which comes before autograd and which nothing else in libtorch uses.
inline constexpr auto deferred_init_key = c10::DispatchKey::TESTING_ONLY_GenericMode;

// Arguments or results of an operator.
using OperatorValues = std::vector<c10::IValue>;

// Calls visit(tensor) for the defined tensors in a value.
template <class Visit>
void for_tensors(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorList()) visit(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor> tensor : value.toOptionalTensorList()) {
      if (tensor && tensor->defined()) visit(*tensor);
    }
  }
}

// The value with replace(tensor) in place of each of them.
template <class Replace>
c10::IValue with_tensors(const c10::IValue& value, const Replace& replace) {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(replace(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorList()) list.push_back(replace(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor> tensor : value.toOptionalTensorList()) {
      list.push_back(tensor && tensor->defined() ? std::optional(replace(*tensor)) : tensor);
    }
    return list;
  }
  return value;
}

// All records, and the storages without memory. One per process, because scopes may share tensors.
class DeferredTape {
 public:
  static DeferredTape& instance() {
    static auto* tape = new DeferredTape;  // never destroyed: modules may outlive static objects
    return *tape;
  }

  bool deferred(const at::Tensor& tensor) const;
  at::Tensor make_like(const at::Tensor& meta, c10::Device device);
  void write_down(const c10::OperatorHandle& op, const OperatorValues& arguments, const OperatorValues& results);
  void materialize(const std::vector<at::Tensor>& tensors);

 private:
  // Recorded operator that has not run.
  struct Record {
    c10::OperatorHandle op;
    OperatorValues arguments;                // deferred tensors, as aliases, and copies of others
    OperatorValues results;                  // tensors to be filled; empty: the operator writes to its arguments
    std::vector<c10::StorageImpl*> written;  // storages of results, or of the arguments that it writes to
  };
  using Storages = std::unordered_set<c10::StorageImpl*>;

  bool without_memory(c10::StorageImpl* storage) const;
  std::vector<c10::StorageImpl*> deferred_in(const OperatorValues& values) const;
  std::vector<bool> due_for(Storages& needed) const;
  static std::vector<c10::StorageImpl*> written_by(const Record& record);
  static void keep_values(Record& record, const Storages& readable,
                          std::unordered_map<c10::StorageImpl*, c10::Storage>& copies);
  void run(const Record& record) const;
  void forget();

  mutable std::mutex mutex_;
  std::unordered_map<c10::StorageImpl*, c10::weak_intrusive_ptr<c10::StorageImpl>> storages_;
  std::vector<Record> records_;
};

}  // namespace shoal
