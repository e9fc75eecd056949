#include "shoal/deferred_init.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <fmt/format.h>
#include <torch/library.h>
#include <torch/utils.h>

#include <mutex>
#include <set>
#include <unordered_map>
#include <unordered_set>

#include "shoal/error.h"

namespace shoal {
namespace {

// Dispatch key that comes before autograd and that nothing else in libtorch uses.
constexpr auto mode = c10::DispatchKey::TESTING_ONLY_GenericMode;

using Values = std::vector<c10::IValue>;

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

c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

// A tensor of the same memory and shape that keeps them when set_data() gives the original other memory.
at::Tensor alias_of(const at::Tensor& tensor) {
  return at::Tensor(tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0), true));
}

// A copy of the values, because the program may change or free them before the operator runs.
at::Tensor copy_of(const at::Tensor& tensor) {
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) return tensor;  // a copy would have another type promotion
  return tensor.detach().clone();
}

c10::Storage copy_of(const c10::Storage& storage) {
  const auto bytes = at::empty({0}, at::TensorOptions(at::kByte).device(storage.device()));
  bytes.set_(storage, 0, {static_cast<int64_t>(storage.nbytes())}, {1});
  return bytes.clone().storage();
}

// Recorded operator that has not run.
struct Record {
  c10::OperatorHandle op;
  Values arguments;                        // deferred tensors, as aliases, and copies of others
  Values results;                          // tensors to be filled; empty: the operator writes to its arguments
  std::vector<c10::StorageImpl*> written;  // storages of results, or of the arguments that it writes to
};

std::vector<c10::StorageImpl*> storages_written_by(const Record& record) {
  std::vector<c10::StorageImpl*> list;
  const auto add = [&](const at::Tensor& tensor) { list.push_back(storage_of(tensor)); };
  for (const auto& result : record.results) for_tensors(result, add);
  if (!record.results.empty()) return list;
  const auto& declared = record.op.schema().arguments();
  for (size_t i = 0; i < declared.size(); ++i) {
    const auto* alias = declared[i].alias_info();
    if (alias != nullptr && alias->isWrite()) for_tensors(record.arguments[i], add);
  }
  return list;
}

using Storages = std::unordered_set<c10::StorageImpl*>;

// All records, and the storages without memory. One per process, because scopes may share tensors.
class Tape {
 public:
  static Tape& instance() {
    static auto* tape = new Tape;  // never destroyed: modules may outlive static objects
    return *tape;
  }

  bool deferred(const at::Tensor& tensor) {
    const std::lock_guard lock(mutex_);
    return without_memory(storage_of(tensor));
  }
  at::Tensor make_like(const at::Tensor& meta, c10::Device device);
  void write_down(const c10::OperatorHandle& op, const Values& arguments, const Values& results);
  void materialize(const std::vector<at::Tensor>& tensors);

 private:
  bool without_memory(c10::StorageImpl* storage) const;
  std::vector<c10::StorageImpl*> deferred_in(const Values& values) const;
  std::vector<bool> due_for(Storages& needed) const;
  void run(const Record& record) const;
  void forget();

  mutable std::mutex mutex_;
  std::unordered_map<c10::StorageImpl*, c10::weak_intrusive_ptr<c10::StorageImpl>> storages_;
  std::vector<Record> records_;
};

bool Tape::without_memory(c10::StorageImpl* storage) const {
  const auto found = storages_.find(storage);
  return found != storages_.end() && !found->second.expired();
}

at::Tensor Tape::make_like(const at::Tensor& meta, c10::Device device) {
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

std::vector<c10::StorageImpl*> Tape::deferred_in(const Values& values) const {
  std::vector<c10::StorageImpl*> list;
  for (const auto& value : values) {
    for_tensors(value, [&](const at::Tensor& tensor) {
      if (without_memory(storage_of(tensor))) list.push_back(storage_of(tensor));
    });
  }
  return list;
}

void Tape::write_down(const c10::OperatorHandle& op, const Values& arguments, const Values& results) {
  const auto keep = [&](const at::Tensor& tensor) { return deferred(tensor) ? alias_of(tensor) : copy_of(tensor); };
  Record record{op, {}, {}, {}};
  for (const auto& value : arguments) record.arguments.push_back(with_tensors(value, keep));
  for (const auto& value : results) record.results.push_back(with_tensors(value, keep));
  record.written = storages_written_by(record);
  const std::lock_guard lock(mutex_);
  records_.push_back(std::move(record));
}

void Tape::run(const Record& record) const {
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
std::vector<bool> Tape::due_for(Storages& needed) const {
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

// Gives a record that runs later copies of the memory that it reads and that others may change from now on. copies: those of
// the present values.
void keep_values(Record& record, const Storages& readable,
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

void Tape::materialize(const std::vector<at::Tensor>& tensors) {
  const std::lock_guard lock(mutex_);
  Storages needed;
  for (auto* storage : deferred_in(Values(tensors.begin(), tensors.end()))) needed.insert(storage);
  if (needed.empty()) return;
  const auto due = due_for(needed);
  const c10::impl::ExcludeDispatchKeyGuard for_real(mode);
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
void Tape::forget() {
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

// Whether results depend on shapes only, not on values.
bool only_views(const c10::FunctionSchema& schema) {
  // In-place operators that only change shapes.
  static const std::set<std::string> shapes{"aten::set_",    "aten::resize_",    "aten::resize_as_",
                                            "aten::t_",      "aten::transpose_", "aten::squeeze_",
                                            "aten::detach_", "aten::unsqueeze_", "aten::as_strided_"};
  if (shapes.count(schema.name()) > 0) return true;
  if (schema.is_mutable()) return false;
  for (const auto& result : schema.returns()) {
    if (result.alias_info() == nullptr) return false;
  }
  return true;
}

// The argument that is returned as `result`.
const c10::IValue& written_argument(const c10::FunctionSchema& schema, const c10::Argument& result,
                                    const Values& arguments) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias == nullptr || result.alias_info() == nullptr) continue;
    if (alias->beforeSets() == result.alias_info()->beforeSets()) return arguments[i];
  }
  throw UsageError(
      fmt::format("DeferredInit: {} writes to one tensor and returns another, which cannot be recorded; call it after "
                  "materialize()",
                  schema.name()));
}

void require_deferred_targets(const c10::FunctionSchema& schema, const Values& arguments) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias == nullptr || !alias->isWrite()) continue;
    for_tensors(arguments[i], [&](const at::Tensor& target) {
      if (Tape::instance().deferred(target)) return;
      throw UsageError(
          fmt::format("DeferredInit: {} writes deferred values to a tensor that has memory; call materialize() first",
                      schema.name()));
    });
  }
}

// Runs the operator on the meta device, for the shapes of its results.
Values results_in_shape(const c10::OperatorHandle& op, const Values& arguments, std::optional<int> device) {
  const c10::Device meta(c10::DeviceType::Meta);
  torch::jit::Stack stack;
  for (const auto& value : arguments) {
    stack.push_back(with_tensors(value, [&](const at::Tensor& tensor) {
      return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(meta).requires_grad(false));
    }));
  }
  if (device) stack[*device] = meta;
  op.callBoxed(&stack);
  return stack;
}

// The same, without results for an operator without tensors among its arguments, which can run at once.
std::optional<Values> shapes_if_known(const c10::OperatorHandle& op, const Values& arguments, std::optional<int> device,
                                      bool any_tensor) {
  try {
    return results_in_shape(op, arguments, device);
  } catch (const c10::NotImplementedError&) {
    if (!any_tensor) return std::nullopt;
    throw UsageError(
        fmt::format("DeferredInit: {} cannot be recorded, because PyTorch does not know the shape of its result before "
                    "it runs; call it after materialize(), or outside the scope",
                    op.schema().name()));
  }
}

void defer(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  if (op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) {
    // Composite operators consist of others, which are dispatched here in turn; some of those are views or copies
    // depending on the tensor.
    op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, mode), stack);
    return;
  }
  const c10::impl::ExcludeDispatchKeyGuard below(mode);
  const auto& schema = op.schema();
  auto& tape = Tape::instance();
  const auto count = static_cast<std::ptrdiff_t>(schema.arguments().size());
  const Values arguments(stack->end() - count, stack->end());
  bool any_tensor = false, any_deferred = false;
  c10::Device place(c10::DeviceType::CPU);
  for (const auto& value : arguments) {
    for_tensors(value, [&](const at::Tensor& tensor) {
      any_tensor = true;
      if (any_deferred || !tape.deferred(tensor)) return;
      any_deferred = true;
      place = tensor.device();
    });
  }
  const auto device = schema.argumentIndexWithName("device");
  if (device && arguments[*device].isDevice()) place = arguments[*device].toDevice();
  const bool makes = device && !any_tensor && place.type() != c10::DeviceType::Meta;
  if ((!makes && !any_deferred) || (any_deferred && only_views(schema))) {
    op.callBoxed(stack);
    return;
  }
  if (schema.is_mutable()) {
    require_deferred_targets(schema, arguments);
    stack->erase(stack->end() - count, stack->end());
    for (const auto& result : schema.returns()) stack->push_back(written_argument(schema, result, arguments));
    tape.write_down(op, arguments, {});
    return;
  }
  for (const auto& result : schema.returns()) {
    const auto kind = result.type()->kind();
    if (kind == c10::TypeKind::TensorType || kind == c10::TypeKind::ListType) continue;
    throw UsageError(
        fmt::format("DeferredInit: {} needs the values of a deferred tensor; call materialize() first", schema.name()));
  }
  const auto shapes = shapes_if_known(op, arguments, device, any_tensor);
  if (!shapes) {
    op.callBoxed(stack);
    return;
  }
  stack->erase(stack->end() - count, stack->end());
  Values results;
  for (const auto& shape : *shapes) {
    results.push_back(with_tensors(shape, [&](const at::Tensor& meta) { return tape.make_like(meta, place); }));
  }
  stack->insert(stack->end(), results.begin(), results.end());
  if (schema.name().rfind("aten::empty", 0) != 0 && schema.name().rfind("aten::new_empty", 0) != 0) {
    tape.write_down(op, arguments, results);
  }
}

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&defer>());
}

}  // namespace

DeferredInit::DeferredInit() : guard_(mode) {}

bool is_deferred(const at::Tensor& tensor) {
  return tensor.defined() && Tape::instance().deferred(tensor);
}

void materialize(const std::vector<at::Tensor>& tensors) {
  Tape::instance().materialize(tensors);
}

}  // namespace shoal
