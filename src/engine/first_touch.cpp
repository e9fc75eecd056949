#include "engine/first_touch.h"

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>

#include <mutex>
#include <set>

namespace shoal {

// RecordFunction takes plain functions only, so the process has one, and one list of whom it tells.
struct TouchWatch {
  std::recursive_mutex mutex;  // of all FirstTouch objects: what they are told may make them arm again
  std::set<FirstTouch*> armed;
  at::CallbackHandle handle = at::INVALID_CALLBACK_HANDLE;

  static TouchWatch& instance() {
    static auto* watch = new TouchWatch;  // operators may run while the process ends
    return *watch;
  }

  void begin(FirstTouch* watcher) {
    armed.insert(watcher);
    if (handle != at::INVALID_CALLBACK_HANDLE) return;
    handle = at::addGlobalCallback(at::RecordFunctionCallback(&before_operator)
                                       .needsInputs(true)
                                       .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
  }

  void end(FirstTouch* watcher) {
    armed.erase(watcher);
    if (!armed.empty() || handle == at::INVALID_CALLBACK_HANDLE) return;
    at::removeCallback(std::exchange(handle, at::INVALID_CALLBACK_HANDLE));
  }

  static std::unique_ptr<at::ObserverContext> before_operator(const at::RecordFunction& call) {
    auto& watch = instance();
    const std::lock_guard lock(watch.mutex);
    const auto see = [&](const at::Tensor& tensor) {
      if (!tensor.defined() || !tensor.has_storage()) return;
      // A copy: who is told may leave the list.
      const auto watchers = watch.armed;
      for (auto* watcher : watchers) watcher->touch(tensor.storage().unsafeGetStorageImpl());
    };
    for (const auto& input : call.inputs()) {
      if (watch.armed.empty()) break;
      if (input.isTensor()) {
        see(input.toTensor());
      } else if (input.isTensorList()) {
        for (const auto& tensor : input.toTensorVector()) see(tensor);
      }
    }
    return nullptr;
  }
};

FirstTouch::~FirstTouch() {
  auto& watch = TouchWatch::instance();
  const std::lock_guard lock(watch.mutex);
  watch.end(this);
}

void FirstTouch::arm(size_t index, const at::Tensor& memory) {
  auto& watch = TouchWatch::instance();
  const std::lock_guard lock(watch.mutex);
  armed_[memory.storage().unsafeGetStorageImpl()] = index;
  watch.begin(this);
}

void FirstTouch::touch_all() {
  const std::lock_guard lock(TouchWatch::instance().mutex);
  while (!armed_.empty()) touch(armed_.begin()->first);
}

void FirstTouch::touch(const void* storage) {
  const auto found = armed_.find(storage);
  if (found == armed_.end()) return;
  const auto index = found->second;
  armed_.erase(found);
  if (armed_.empty()) TouchWatch::instance().end(this);
  const at::RecordFunctionGuard own_operators(/*is_enabled=*/false);
  touched_(index);
}

}  // namespace shoal
