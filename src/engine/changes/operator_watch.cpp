#include "engine/changes/operator_watch.h"

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

#include "base/called_by_pytorch.h"
#include "engine/changes/outside_inference_mode.h"
#include "module/permanent_library.h"

namespace shoal {
namespace {

// Dispatch key that routes operators of marked tensors through this file. Nothing else in libtorch uses it, and views
// inherit it. (at::RecordFunction sees operators, too, but then every operator of the process pays.)
constexpr auto mark = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

// The scopes of torch.func, which wrap tensors that are made in them.
constexpr c10::DispatchKeySet transforms{c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                                         c10::DispatchKey::FuncTorchDynamicLayerBackMode};

// Registry of observers by memory. One per process, because operators know only their tensors.
class Users {
 public:
  static Users& instance() {
    static auto* users = new Users;  // never destroyed: operators may run while the process ends
    return *users;
  }

  void add(c10::StorageImpl* storage, MemoryUser& user, Watched what) {
    const std::lock_guard lock(mutex_);
    auto& entries = users_[storage];
    const auto same = [&](const Entry& entry) { return entry.user == &user; };
    if (std::none_of(entries.begin(), entries.end(), same)) entries.push_back({&user, what});
  }

  void remove(c10::StorageImpl* storage, MemoryUser& user) {
    const std::lock_guard lock(mutex_);
    const auto found = users_.find(storage);
    if (found == users_.end()) return;
    auto& entries = found->second;
    entries.erase(std::remove_if(entries.begin(), entries.end(), [&](const Entry& e) { return e.user == &user; }),
                  entries.end());
    if (entries.empty()) users_.erase(found);
  }

  template <class Visit>
  void visit(c10::StorageImpl* storage, const Visit& visit) const {
    const std::shared_lock lock(mutex_);
    const auto found = users_.find(storage);
    if (found == users_.end()) return;
    for (const auto& [user, what] : found->second) visit(*user, what);
  }

 private:
  mutable std::shared_mutex mutex_;
  struct Entry {
    MemoryUser* user;
    Watched what;
  };
  std::unordered_map<c10::StorageImpl*, c10::SmallVector<Entry, 2>> users_;
};

// Uses of watched memory by one operator call.
class Uses {
 public:
  explicit Uses(std::string_view op) : op_(op) {}
  Uses(const Uses&) = delete;
  Uses& operator=(const Uses&) = delete;
  ~Uses() {
    for (size_t use = 0; use < begun_; ++use) {
      if (!uses_[use].memory.empty()) uses_[use].user->end_use(uses_[use].memory);
    }
  }

  // writes: returns whether the operator writes the argument; called only if somebody watches it.
  template <class Writes>
  void see(const at::Tensor& tensor, const Writes& writes) {
    if (!tensor.defined() || !tensor.key_set().has(mark)) return;
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    Users::instance().visit(storage, [&](MemoryUser& user, Watched what) {
      const bool written = writes();
      if (what == Watched::writes && !written) return;
      auto& use = use_of(user);
      if (what == Watched::all) add(use.memory, storage);
      if (written) add(use.written, storage);
    });
  }

  template <class Writes>
  void see(const c10::IValue& value, const Writes& writes) {
    if (value.isTensor()) {
      see(value.toTensor(), writes);
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorList()) see(tensor, writes);
    } else if (value.isOptionalTensorList()) {
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
        if (tensor) see(*tensor, writes);
      }
    }
  }

  // Unboxed arguments.
  template <class Writes>
  void see(const std::optional<at::Tensor>& tensor, const Writes& writes) {
    if (tensor) see(*tensor, writes);
  }
  template <class Other, class Writes>
  void see(const Other&, const Writes&) {
    static_assert(!std::is_convertible_v<Other, at::TensorList> && !std::is_convertible_v<Other, at::ITensorListRef>);
  }

  // Whether memory is used whose observer wants to know all uses, since it may take the memory away afterwards.
  bool of_passing_memory() const {
    return std::any_of(uses_.begin(), uses_.end(), [](const Use& use) { return !use.memory.empty(); });
  }

  void begin() {
    if (uses_.empty()) return;
    called_by_pytorch([this] { tell_users(); });
  }

 private:
  using Memory = c10::SmallVector<c10::StorageImpl*, 4>;
  struct Use {
    MemoryUser* user;
    Memory memory;
    c10::SmallVector<c10::StorageImpl*, 1> written;
  };

  void tell_users() {
    const UnwatchedOperators own;  // operators that observers call
    const OutsideInferenceMode outside;
    const c10::impl::ExcludeDispatchKeyGuard untransformed(transforms);
    for (; begun_ < uses_.size(); ++begun_) {
      if (!uses_[begun_].memory.empty()) uses_[begun_].user->begin_use(op_, uses_[begun_].memory);
    }
    for (const auto& use : uses_) {
      for (auto* storage : use.written) use.user->before_write(op_, storage);
    }
  }

  Use& use_of(MemoryUser& user) {
    auto* place = std::find_if(uses_.begin(), uses_.end(), [&](const Use& use) { return use.user == &user; });
    return place == uses_.end() ? uses_.emplace_back(Use{&user, {}, {}}) : *place;
  }

  template <class List>
  static void add(List& list, c10::StorageImpl* storage) {
    if (std::find(list.begin(), list.end(), storage) == list.end()) list.push_back(storage);
  }

  std::string_view op_;
  c10::SmallVector<Use, 1> uses_;
  size_t begun_ = 0;
};

c10::DispatchKeySet below(c10::DispatchKeySet keys) {
  return keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, mark);
}

void tell(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  Uses uses(schema.name());
  const auto values = torch::jit::last(*stack, schema.arguments().size());
  for (size_t i = 0; i < values.size(); ++i) {
    uses.see(values[i], [&] {
      const auto* alias = schema.arguments()[i].alias_info();
      return alias != nullptr && alias->isWrite();
    });
  }
  uses.begin();
  op.redispatchBoxed(below(keys), stack);
}

// What to() returns without a conversion is the tensor itself, and numpy() in Python keeps its pointer. Outside of
// autograd, as after detach(), it is a copy here. Where observers have brought no memory there is nothing to point to.
void tell_of_to(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  Uses uses(schema.name());
  const auto values = torch::jit::last(*stack, schema.arguments().size());
  const auto self = values[0].toTensor();
  for (const auto& value : values) uses.see(value, [] { return false; });
  uses.begin();
  op.redispatchBoxed(below(keys), stack);
  const auto result = stack->back().toTensor();
  if (self.requires_grad() || !uses.of_passing_memory() || !result.is_alias_of(self)) return;
  if (self.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get() == nullptr) return;
  const UnwatchedOperators own;
  stack->back() = result.clone();
}

// Unboxed version of tell(): packing arguments into a stack costs more than the rest.
template <class Op, class Schema = typename Op::schema>
struct Direct;

template <class Op, class Result, class... Arguments>
struct Direct<Op, Result(Arguments...)> {
  static Result tell(c10::DispatchKeySet keys, Arguments... arguments) {
    Uses uses(Op::name);
    (uses.see(arguments, [] { return std::is_same_v<Arguments, at::Tensor&>; }), ...);
    uses.begin();
    return Op::redispatch(below(keys), arguments...);
  }
};

template <class... Ops>
void tell_directly(torch::Library& library) {
  (library.impl(Ops::name, &Direct<Ops>::tell), ...);
}

// True if an observer has zeroed the memory itself.
bool zeroed_by_user(const at::Tensor& tensor) {
  if (!tensor.is_non_overlapping_and_dense() || tensor.nbytes() != tensor.storage().nbytes()) return false;
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  bool zeroed = false;
  Users::instance().visit(storage, [&](MemoryUser& user, Watched) { zeroed = zeroed || user.zero(storage); });
  return zeroed;
}

at::Tensor& tell_of_zero(c10::DispatchKeySet keys, at::Tensor& self) {
  return zeroed_by_user(self) ? self : Direct<at::_ops::zero_>::tell(keys, self);
}

at::Tensor& tell_of_fill(c10::DispatchKeySet keys, at::Tensor& self, const at::Scalar& value) {
  const bool zero = !value.isSymbolic() && value.equal(0);
  return zero && zeroed_by_user(self) ? self : Direct<at::_ops::fill__Scalar>::tell(keys, self, value);
}

void watch_all_operators(torch::Library& library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&tell>());
}

// Operators that touch no memory of their own: those that make views or change metadata, and composite operators, whose
// parts are observed.
void watch_some_operators(torch::Library& library) {
  for (const auto* name : {"alias",
                           "as_strided",
                           "conv1d",
                           "conv2d",
                           "conv3d",
                           "data",
                           "detach",
                           "detach_",
                           "empty_like",
                           "expand",
                           "layer_norm",
                           "linear",
                           "matmul",
                           "narrow",
                           "permute",
                           "requires_grad_",
                           "retain_grad",
                           "reshape",
                           "resolve_conj",
                           "resolve_neg",
                           "select.int",
                           "set_data",
                           "slice.Tensor",
                           "split.Tensor",
                           "squeeze.dim",
                           "t",
                           "transpose.int",
                           "unsqueeze",
                           "view",
                           "zeros_like",
                           "_has_compatible_shallow_copy_type"}) {
    library.impl(name, torch::CppFunction::makeFallthrough());
  }
  for (const auto* name : {"to.device", "to.dtype", "to.dtype_layout", "to.other"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&tell_of_to>());
  }
  // Operators that layers apply to their parameters.
  using namespace at::_ops;
  library.impl("zero_", &tell_of_zero);
  library.impl("fill_.Scalar", &tell_of_fill);
  tell_directly<addmm, convolution, convolution_backward, copy_, index_select, mm, native_layer_norm,
                native_layer_norm_backward>(library);
}

[[gnu::used]] const auto& all_operators = permanent_library("_", mark, watch_all_operators);
[[gnu::used]] const auto& some_operators = permanent_library("aten", mark, watch_some_operators);

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

bool is_watchable(const at::Tensor& tensor) {
  return tensor.key_set().has(mark);
}

void watch(c10::StorageImpl* storage, MemoryUser& user, Watched what) {
  Users::instance().add(storage, user, what);
}

void unwatch(c10::StorageImpl* storage, MemoryUser& user) {
  Users::instance().remove(storage, user);
}

bool is_lost(const at::Tensor& tensor) {
  if (!is_watchable(tensor)) return false;
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  if (storage->nbytes() == 0 || storage->_mutable_data_ptr_no_checks().get() != nullptr) return false;
  bool watched = false;
  Users::instance().visit(storage, [&](MemoryUser&, Watched) { watched = true; });
  return !watched;
}

UnwatchedOperators::UnwatchedOperators() : guard_(mark) {}

}  // namespace shoal
