#include "strategy/fsdp/taken.h"

#include <mutex>
#include <unordered_map>

namespace shoal {
namespace {

struct Registry {
  std::mutex mutex;
  std::unordered_map<const c10::TensorImpl*, Taken> tensors;

  static Registry& instance() {
    static auto* registry = new Registry;  // never destroyed: wrappers may outlive static objects
    return *registry;
  }
};

}  // namespace

std::optional<Taken> taken(const at::Tensor& tensor) {
  auto& registry = Registry::instance();
  const std::lock_guard lock(registry.mutex);
  const auto place = registry.tensors.find(tensor.unsafeGetTensorImpl());
  return place == registry.tensors.end() ? std::nullopt : std::optional(place->second);
}

void take(const at::Tensor& tensor, const Taken& taken) {
  auto& registry = Registry::instance();
  const std::lock_guard lock(registry.mutex);
  auto& entry = registry.tensors[tensor.unsafeGetTensorImpl()];
  if (entry.by == nullptr || !taken.ignored) entry = taken;
}

void give_back_all_of(const FullyShardedCore& wrapper) {
  auto& registry = Registry::instance();
  const std::lock_guard lock(registry.mutex);
  std::erase_if(registry.tensors, [&](const auto& entry) { return entry.second.by == &wrapper; });
}

ModuleSet parts_of(const torch::nn::Module& module) {
  ModuleSet parts{&module};
  for (const auto& part : module.modules(/*include_self=*/false)) parts.insert(part.get());
  return parts;
}

std::optional<Taken> taken_within(const at::Tensor& tensor, const ModuleSet& modules) {
  const auto found = taken(tensor);
  return found && modules.contains(found->module) ? found : std::nullopt;
}

}  // namespace shoal
