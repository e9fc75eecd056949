#include "engine/operator_watch.h"

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>

#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace shoal {
namespace {

struct Use {
  MemoryUser* user;
  c10::StorageImpl* storage;
};

// What one operator has to give back.
struct Uses : at::ObserverContext {
  std::vector<Use> list;
};

std::unique_ptr<at::ObserverContext> before_operator(const at::RecordFunction& call);
void after_operator(const at::RecordFunction& call, at::ObserverContext* context);

// RecordFunction takes plain functions only, so the process has one, and one table of whom it tells.
class Table {
 public:
  static Table& instance() {
    static auto* table = new Table;  // operators may run while the process ends
    return *table;
  }

  void add(c10::StorageImpl* storage, MemoryUser& user) {
    const std::lock_guard lock(mutex_);
    users_[storage] = &user;
    if (handle_ != at::INVALID_CALLBACK_HANDLE) return;
    handle_ = at::addGlobalCallback(at::RecordFunctionCallback(&before_operator, &after_operator)
                                        .needsInputs(true)
                                        .scopes({at::RecordScope::FUNCTION}));
  }

  void remove(c10::StorageImpl* storage) {
    const std::lock_guard lock(mutex_);
    users_.erase(storage);
    if (!users_.empty() || handle_ == at::INVALID_CALLBACK_HANDLE) return;
    at::removeCallback(std::exchange(handle_, at::INVALID_CALLBACK_HANDLE));
  }

  MemoryUser* find(c10::StorageImpl* storage) const {
    const std::shared_lock lock(mutex_);
    const auto found = users_.find(storage);
    return found == users_.end() ? nullptr : found->second;
  }

 private:
  mutable std::shared_mutex mutex_;
  std::unordered_map<c10::StorageImpl*, MemoryUser*> users_;
  at::CallbackHandle handle_ = at::INVALID_CALLBACK_HANDLE;
};

std::unique_ptr<at::ObserverContext> before_operator(const at::RecordFunction& call) {
  std::unique_ptr<Uses> uses;
  const auto see = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.has_storage()) return;
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    auto* user = Table::instance().find(storage);
    if (user == nullptr) return;
    // What the user does about it are its own operators.
    const at::RecordFunctionGuard own_operators(/*is_enabled=*/false);
    if (!user->begin_use(storage)) return;
    if (!uses) uses = std::make_unique<Uses>();
    uses->list.push_back({user, storage});
  };
  for (const auto& input : call.inputs()) {
    if (input.isTensor()) {
      see(input.toTensor());
    } else if (input.isTensorList()) {
      for (const at::Tensor& tensor : input.toTensorList()) see(tensor);
    }
  }
  return uses;
}

void after_operator(const at::RecordFunction&, at::ObserverContext* context) {
  if (context == nullptr) return;
  for (const auto& use : static_cast<Uses*>(context)->list) use.user->end_use(use.storage);
}

}  // namespace

void watch(c10::StorageImpl* storage, MemoryUser& user) {
  Table::instance().add(storage, user);
}

void unwatch(c10::StorageImpl* storage) {
  Table::instance().remove(storage);
}

}  // namespace shoal
