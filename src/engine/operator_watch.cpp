#include "engine/operator_watch.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/addmm_ops.h>
#include <ATen/ops/convolution_backward_ops.h>
#include <ATen/ops/convolution_ops.h>
#include <ATen/ops/copy_ops.h>
#include <ATen/ops/fill_ops.h>
#include <ATen/ops/index_select_ops.h>
#include <ATen/ops/mm_ops.h>
#include <ATen/ops/native_layer_norm_backward_ops.h>
#include <ATen/ops/native_layer_norm_ops.h>
#include <ATen/ops/zero_ops.h>
#include <c10/util/SmallVector.h>
#include <torch/library.h>

#include <algorithm>
#include <shared_mutex>
#include <unordered_map>

namespace shoal {
namespace {

// A mark on tensors that brings their operators here first. Nothing else in libtorch uses it, and what makes a view
// hands it on. (at::RecordFunction also sees operators, but then every operator of the process pays.)
constexpr auto mark = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

// Who uses which memory. Operators know nothing but their tensors, so the process has one.
class Users {
 public:
  static Users& instance() {
    static auto* users = new Users;  // operators may run while the process ends
    return *users;
  }

  void add(c10::StorageImpl* storage, MemoryUser& user) {
    const std::lock_guard lock(mutex_);
    users_[storage] = &user;
  }

  void remove(c10::StorageImpl* storage) {
    const std::lock_guard lock(mutex_);
    users_.erase(storage);
  }

  MemoryUser* find(c10::StorageImpl* storage) const {
    const std::shared_lock lock(mutex_);
    const auto found = users_.find(storage);
    return found == users_.end() ? nullptr : found->second;
  }

 private:
  mutable std::shared_mutex mutex_;
  std::unordered_map<c10::StorageImpl*, MemoryUser*> users_;
};

// What one operator takes.
class Uses {
 public:
  explicit Uses(std::string_view op) : op_(op) {}
  Uses(const Uses&) = delete;
  Uses& operator=(const Uses&) = delete;
  ~Uses() {
    for (size_t user = 0; user < begun_; ++user) users_[user].first->end_use(users_[user].second);
  }

  void see(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.key_set().has(mark)) return;
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    auto* user = Users::instance().find(storage);
    if (user == nullptr) return;
    auto* place = std::find_if(users_.begin(), users_.end(), [&](const auto& entry) { return entry.first == user; });
    if (place == users_.end()) place = &users_.emplace_back(user, Memory());
    auto& memory = place->second;
    if (std::find(memory.begin(), memory.end(), storage) == memory.end()) memory.push_back(storage);
  }

  void see(const c10::IValue& value) {
    if (value.isTensor()) {
      see(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorList()) see(tensor);
    } else if (value.isOptionalTensorList()) {
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
        if (tensor) see(*tensor);
      }
    }
  }

  // What an operator takes as it is called, not packed into a stack.
  void see(const std::optional<at::Tensor>& tensor) {
    if (tensor) see(*tensor);
  }
  template <class Other>
  void see(const Other&) {
    static_assert(!std::is_convertible_v<Other, at::TensorList> && !std::is_convertible_v<Other, at::ITensorListRef>);
  }

  void begin() {
    if (users_.empty()) return;
    const UnwatchedOperators own;  // what users do about it
    for (; begun_ < users_.size(); ++begun_) users_[begun_].first->begin_use(op_, users_[begun_].second);
  }

 private:
  using Memory = c10::SmallVector<c10::StorageImpl*, 4>;

  std::string_view op_;
  c10::SmallVector<std::pair<MemoryUser*, Memory>, 1> users_;
  size_t begun_ = 0;
};

c10::DispatchKeySet below(c10::DispatchKeySet keys) {
  return keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, mark);
}

void tell(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  Uses uses(op.schema().name());
  for (const auto& argument : torch::jit::last(*stack, op.schema().arguments().size())) uses.see(argument);
  uses.begin();
  op.redispatchBoxed(below(keys), stack);
}

// The same without packing arguments into a stack, which costs more than the rest.
template <class Op, class Schema = typename Op::schema>
struct Direct;

template <class Op, class Result, class... Arguments>
struct Direct<Op, Result(Arguments...)> {
  static Result tell(c10::DispatchKeySet keys, Arguments... arguments) {
    Uses uses(Op::name);
    (uses.see(arguments), ...);
    uses.begin();
    return Op::redispatch(below(keys), arguments...);
  }
};

template <class... Ops>
void tell_directly(torch::Library& library) {
  (library.impl(Ops::name, &Direct<Ops>::tell), ...);
}

// Whether the memory's user has zeroed it itself.
bool zeroed_by_user(const at::Tensor& tensor) {
  if (!tensor.is_non_overlapping_and_dense() || tensor.nbytes() != tensor.storage().nbytes()) return false;
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  auto* user = Users::instance().find(storage);
  return user != nullptr && user->zero(storage);
}

at::Tensor& tell_of_zero(c10::DispatchKeySet keys, at::Tensor& self) {
  return zeroed_by_user(self) ? self : Direct<at::_ops::zero_>::tell(keys, self);
}

at::Tensor& tell_of_fill(c10::DispatchKeySet keys, at::Tensor& self, const at::Scalar& value) {
  const bool zero = !value.isSymbolic() && value.equal(0);
  return zero && zeroed_by_user(self) ? self : Direct<at::_ops::fill__Scalar>::tell(keys, self, value);
}

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericWrapper, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&tell>());
}

// Operators that touch no memory: those that make views or change what is known of a tensor, and those that consist of
// other operators, which are told of.
TORCH_LIBRARY_IMPL(aten, TESTING_ONLY_GenericWrapper, library) {
  for (const auto* name :
       {"alias",          "as_strided",   "conv1d",       "conv2d",      "conv3d",
        "data",           "detach",       "detach_",      "empty_like",  "expand",
        "layer_norm",     "linear",       "matmul",       "narrow",      "permute",
        "requires_grad_", "reshape",      "resolve_conj", "resolve_neg", "select.int",
        "set_data",       "slice.Tensor", "split.Tensor", "squeeze.dim", "t",
        "transpose.int",  "unsqueeze",    "view",         "zeros_like",  "_has_compatible_shallow_copy_type"}) {
    library.impl(name, torch::CppFunction::makeFallthrough());
  }
  // What layers do with their parameters.
  using namespace at::_ops;
  library.impl("zero_", &tell_of_zero);
  library.impl("fill_.Scalar", &tell_of_fill);
  tell_directly<addmm, convolution, convolution_backward, copy_, index_select, mm, native_layer_norm,
                native_layer_norm_backward>(library);
}

}  // namespace

at::Tensor watchable(const at::Tensor& tensor) {
  auto marked = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(tensor.storage()),
                                                         tensor.key_set() | c10::DispatchKeySet(mark), tensor.dtype());
  marked.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return marked;
}

bool MemoryUser::zero(c10::StorageImpl*) {
  return false;
}

void watch(c10::StorageImpl* storage, MemoryUser& user) {
  Users::instance().add(storage, user);
}

void unwatch(c10::StorageImpl* storage) {
  Users::instance().remove(storage);
}

UnwatchedOperators::UnwatchedOperators() : guard_(mark) {}

}  // namespace shoal
