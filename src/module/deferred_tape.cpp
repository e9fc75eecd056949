#include "module/deferred_tape.h"

#include <torch/utils.h>

#include <algorithm>

namespace shoal {
namespace {

c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

// A tensor of the same memory and shape that keeps them when set_data() gives the original other memory.
at::Tensor alias_of(const at::Tensor& tensor) {
  return at::Tensor(tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0), true));
}

// A copy of the values, because the program may change or free them before the operator runs.
at::Tensor copy_of(const at::Tensor& tensor) {
  // The copy of a number would have another type promotion.
  if (!tensor.defined() || tensor.unsafeGetTensorImpl()->is_wrapped_number()) return tensor;
  return tensor.detach().clone();
}

c10::Storage copy_of(const c10::Storage& storage) {
  const auto bytes = at::empty({0}, at::TensorOptions(at::kByte).device(storage.device()));
  bytes.set_(storage, 0, {static_cast<int64_t>(storage.nbytes())}, {1});
  return bytes.clone().storage();
}

}  // namespace

std::vector<c10::StorageImpl*> DeferredTape::written_by(const Record& record) {
  std::vector<c10::StorageImpl*> list;
  const auto add = [&](const at::Tensor& tensor) { list.push_back(storage_of(tensor)); };
  for (const auto& result : record.results) for_tensors(result, add);
  if (!record.results.empty()) return list;
  if (record.op.schema().returns().empty() && !record.op.schema().is_mutable()) {
    // A check of values, which has to run when they come.
    for (const auto& value : record.arguments) for_tensors(value, add);
    return list;
  }
  const auto& declared = record.op.schema().arguments();
  for (size_t i = 0; i < declared.size(); ++i) {
    const auto* alias = declared[i].alias_info();
    if (alias != nullptr && alias->isWrite()) for_tensors(record.arguments[i], add);
  }
  return list;
}

bool DeferredTape::without_memory(c10::StorageImpl* storage) const {
  const auto found = storages_.find(storage);
  return found != storages_.end() && !found->second.expired();
}

bool DeferredTape::deferred(const at::Tensor& tensor) const {
  const std::lock_guard lock(mutex_);
  return without_memory(storage_of(tensor));
}

at::Tensor DeferredTape::make_like(const at::Tensor& meta, c10::Device device) {
  auto* allocator = c10::GetAllocator(device.type());
  c10::Storage storage(c10::Storage::use_byte_size_t(), meta.storage().nbytes(), c10::DataPtr(nullptr, device),
                       allocator, /*resizable=*/false);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  auto tensor = at::empty({0}, meta.options().device(device).requires_grad(false));
  tensor.set_(storage, meta.storage_offset(), meta.sizes(), meta.strides());
  storage.unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(
      "this tensor was made in a DeferredInit scope and has no values yet: wrap its module, or call materialize()");
  const std::lock_guard lock(mutex_);
  storages_.insert_or_assign(storage.unsafeGetStorageImpl(), storage.getWeakStorageImpl());
  return tensor;
}

std::vector<c10::StorageImpl*> DeferredTape::deferred_in(const OperatorValues& values) const {
  std::vector<c10::StorageImpl*> list;
  for (const auto& value : values) {
    for_tensors(value, [&](const at::Tensor& tensor) {
      if (without_memory(storage_of(tensor))) list.push_back(storage_of(tensor));
    });
  }
  return list;
}

void DeferredTape::write_down(const c10::OperatorHandle& op, const OperatorValues& arguments,
                              const OperatorValues& results) {
  const auto keep = [&](const at::Tensor& tensor) { return deferred(tensor) ? alias_of(tensor) : copy_of(tensor); };
  Record record{op, {}, {}, {}};
  for (const auto& value : arguments) record.arguments.push_back(with_tensors(value, keep));
  for (const auto& value : results) record.results.push_back(with_tensors(value, keep));
  record.written = written_by(record);
  const std::lock_guard lock(mutex_);
  records_.push_back(std::move(record));
}

void DeferredTape::run(const Record& record) const {
  auto stack = record.arguments;
  record.op.callBoxed(&stack);
  for (size_t i = 0; i < record.results.size(); ++i) {
    std::vector<at::Tensor> values;
    for_tensors(stack[i], [&](const at::Tensor& value) { values.push_back(value); });
    size_t next = 0;
    for_tensors(record.results[i], [&](const at::Tensor& result) { result.copy_(values[next++]); });
  }
}

// Which records write to needed memory; the memory that those read is needed, too, with all that is ever written to it.
std::vector<bool> DeferredTape::due_for(Storages& needed) const {
  std::vector<bool> due(records_.size());
  for (size_t before = 0; before < needed.size();) {
    before = needed.size();
    for (size_t i = records_.size(); i-- > 0;) {
      const auto& written = records_[i].written;
      if (due[i] || std::none_of(written.begin(), written.end(), [&](auto* one) { return needed.contains(one); })) {
        continue;
      }
      due[i] = true;
      for (auto* read : deferred_in(records_[i].arguments)) needed.insert(read);
      for (auto* result : deferred_in(records_[i].results)) needed.insert(result);
    }
  }
  return due;
}

// Gives a record that runs later copies of the memory that it reads and that others may change from now on. copies:
// those of the present values.
void DeferredTape::keep_values(Record& record, const Storages& readable,
                               std::unordered_map<c10::StorageImpl*, c10::Storage>& copies) {
  const auto keep = [&](const at::Tensor& tensor) {
    if (!readable.contains(storage_of(tensor))) return tensor;
    auto& copy = copies[storage_of(tensor)];
    if (!copy) copy = copy_of(tensor.storage());
    auto kept = alias_of(tensor);
    kept.unsafeGetTensorImpl()->set_storage_keep_dtype(copy);
    return kept;
  };
  for (auto& value : record.arguments) value = with_tensors(value, keep);
}

void DeferredTape::materialize(const std::vector<at::Tensor>& tensors) {
  const std::lock_guard lock(mutex_);
  Storages needed;
  for (auto* storage : deferred_in(OperatorValues(tensors.begin(), tensors.end()))) needed.insert(storage);
  if (needed.empty()) return;
  const auto due = due_for(needed);
  const c10::impl::ExcludeDispatchKeyGuard for_real(deferred_init_key);
  const torch::NoGradGuard no_grad;
  for (auto* storage : needed) {
    auto* allocator = c10::GetAllocator(storage->device_type());
    storage->set_data_ptr_noswap(allocator->allocate(storage->nbytes()));
    storage->clear_data_ptr_access_error_msg_();
    storages_.erase(storage);
  }
  std::vector<Record> later;
  std::unordered_map<c10::StorageImpl*, c10::Storage> copies;
  for (size_t i = 0; i < records_.size(); ++i) {
    auto& record = records_[i];
    if (due[i]) {
      run(record);
      for (auto* written : record.written) copies.erase(written);
      record.arguments.clear();  // may hold the last reference to some memory
      record.results.clear();
    } else {
      keep_values(record, needed, copies);
      later.push_back(std::move(record));
    }
  }
  records_ = std::move(later);
  forget();
}

// Drops all records once nothing but the records themselves refers to deferred memory.
void DeferredTape::forget() {
  std::unordered_map<c10::StorageImpl*, size_t> held;
  for (const auto& record : records_) {
    for (const auto* values : {&record.arguments, &record.results}) {
      for (auto* storage : deferred_in(*values)) ++held[storage];
    }
  }
  for (const auto& [storage, weak] : storages_) {
    const auto alive = weak.lock();
    if (alive && alive.use_count() > held[storage] + 1) return;
  }
  records_.clear();
  storages_.clear();
}

}  // namespace shoal
