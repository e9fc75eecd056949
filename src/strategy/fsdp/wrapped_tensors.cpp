#include "strategy/fsdp/wrapped_tensors.h"

#include <mutex>
#include <unordered_map>

namespace shoal {
namespace {

struct Registry {
  std::mutex mutex;
  std::unordered_map<const c10::TensorImpl*, Registration> tensors;

  static Registry& instance() {
    static auto* registry = new Registry;  // never destroyed: wrappers may outlive static objects
    return *registry;
  }
};

}  // namespace

std::optional<Registration> find_registration(const at::Tensor& tensor) {
  auto& registry = Registry::instance();
  const std::lock_guard lock(registry.mutex);
  const auto place = registry.tensors.find(tensor.unsafeGetTensorImpl());
  return place == registry.tensors.end() ? std::nullopt : std::optional(place->second);
}

void register_tensor(const at::Tensor& tensor, const Registration& registration) {
  auto& registry = Registry::instance();
  const std::lock_guard lock(registry.mutex);
  auto& entry = registry.tensors[tensor.unsafeGetTensorImpl()];
  if (entry.by == nullptr || !registration.ignored) entry = registration;
}

void unregister_all(const FullyShardedCore& wrapper) {
  auto& registry = Registry::instance();
  const std::lock_guard lock(registry.mutex);
  std::erase_if(registry.tensors, [&](const auto& entry) { return entry.second.by == &wrapper; });
}

ModuleSet parts_of(const torch::nn::Module& module) {
  ModuleSet parts{&module};
  for (const auto& part : module.modules(/*include_self=*/false)) parts.insert(part.get());
  return parts;
}

std::optional<Registration> find_registration_within(const at::Tensor& tensor, const ModuleSet& modules) {
  const auto found = find_registration(tensor);
  return found && modules.contains(found->module) ? found : std::nullopt;
}

}  // namespace shoal
