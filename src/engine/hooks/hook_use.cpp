#include "engine/hooks/hook_use.h"

#include <fmt/format.h>

#include <algorithm>
#include <mutex>
#include <vector>

#include "checkpoint/on_all_ranks.h"
#include "shoal/error.h"

namespace shoal {
namespace {

class HookUse;

struct HookUses {
  std::mutex mutex;
  std::vector<const HookUse*> all;
};

HookUses& hook_uses() {
  static auto* one = new HookUses;  // never destroyed: wrappers may outlive static objects
  return *one;
}

// One wrapper's use of a hook.
class HookUse {
 public:
  HookUse(std::string wrapper, const torch::nn::Module& module, std::shared_ptr<CommunicationHook> hook)
      : wrapper_(std::move(wrapper)), module_(&module), hook_(std::move(hook)), with_memory_(hook_->with_memory()) {
    const std::lock_guard lock(hook_uses().mutex);
    for (const auto* other : hook_uses().all) {
      for (const auto* one : with_memory_) {
        if (other->module_ != module_ && other->has(one)) refuse(*one, *other);
      }
    }
    hook_uses().all.push_back(this);
  }
  ~HookUse() {
    const std::lock_guard lock(hook_uses().mutex);
    std::erase(hook_uses().all, this);
  }
  HookUse(const HookUse&) = delete;
  HookUse& operator=(const HookUse&) = delete;

  bool has(const CommunicationHook* hook) const {
    return std::find(with_memory_.begin(), with_memory_.end(), hook) != with_memory_.end();
  }

 private:
  void refuse(const CommunicationHook& hook, const HookUse& other) const {
    throw UsageError(fmt::format(
        "{}: the communication hook {} is in use by a {} of another module, and keeps state of its gradients, "
        "which would be mixed with those of this one: make one for each",
        wrapper_, hook.name(), other.wrapper_));
  }

  std::string wrapper_;
  const torch::nn::Module* module_;
  std::shared_ptr<CommunicationHook> hook_;
  std::vector<const CommunicationHook*> with_memory_;
};

}  // namespace

std::shared_ptr<CommunicationHook> in_use_by(const std::string& wrapper, const torch::nn::Module& module,
                                             const Group& group, const std::shared_ptr<CommunicationHook>& hook) {
  if (!hook) return nullptr;
  std::shared_ptr<const HookUse> use;
  on_all_ranks(group, "use of the communication hook",
               [&] { use = std::make_shared<const HookUse>(wrapper, module, hook); });
  return {use, hook.get()};
}

bool is_in_use(const CommunicationHook& hook) {
  const std::lock_guard lock(hook_uses().mutex);
  for (const auto* one : hook.with_memory()) {
    if (std::any_of(hook_uses().all.begin(), hook_uses().all.end(), [one](const auto* use) { return use->has(one); }))
      return true;
  }
  return false;
}

}  // namespace shoal
