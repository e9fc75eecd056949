#include "module/walk.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/modules/embedding.h>

#include <algorithm>
#include <set>
#include <unordered_map>

#include "shoal/deferred_init.h"
#include "shoal/error.h"

namespace shoal {
namespace {

// Weights of embeddings.
struct Weights {
  std::set<const c10::TensorImpl*> sparse{};
  std::set<const c10::TensorImpl*> renormalised{};

  void add(const torch::nn::Module& module) {
    if (const auto* embedding = module.as<torch::nn::Embedding>()) add(embedding->weight, embedding->options);
    if (const auto* bag = module.as<torch::nn::EmbeddingBag>()) add(bag->weight, bag->options);
  }

 private:
  template <class Options>
  void add(const at::Tensor& weight, const Options& options) {
    if (options.sparse()) sparse.insert(weight.unsafeGetTensorImpl());
    if (options.max_norm()) renormalised.insert(weight.unsafeGetTensorImpl());
  }
};

Weights weights_of(const torch::nn::Module& module) {
  Weights weights;
  weights.add(module);  // separately, because modules() would need a shared pointer to it
  for (const auto& child : module.modules(/*include_self=*/false)) weights.add(*child);
  return weights;
}

// libtorch lists a shared tensor under each of its names; the result has one entry with aliases.
std::vector<NamedTensor> merge(const torch::OrderedDict<std::string, at::Tensor>& named) {
  std::vector<NamedTensor> list;
  std::unordered_map<const c10::TensorImpl*, size_t> seen;
  for (const auto& item : named) {
    if (!item.value().defined()) continue;
    const auto [found, fresh] = seen.try_emplace(item.value().unsafeGetTensorImpl(), list.size());
    if (fresh) {
      list.push_back({.name = item.key(), .aliases = {}, .tensor = item.value()});
    } else {
      list[found->second].aliases.push_back(item.key());
    }
  }
  return list;
}

void drop_ignored(std::vector<NamedTensor>& list, std::set<std::string> ignored, std::set<std::string>& unknown) {
  std::erase_if(list, [&](const NamedTensor& entry) {
    bool drop = ignored.count(entry.name) > 0;
    unknown.erase(entry.name);
    for (const auto& alias : entry.aliases) {
      drop = drop || ignored.count(alias) > 0;
      unknown.erase(alias);
    }
    return drop;
  });
}

std::string describe_tensor(const char* kind, const NamedTensor& entry) {
  const auto& tensor = entry.tensor;
  auto text = fmt::format("{} {} {} [{}]", kind, entry.name, c10::toString(tensor.scalar_type()),
                          fmt::join(tensor.sizes(), ", "));
  if (!tensor.is_contiguous()) text += fmt::format(" strides [{}]", fmt::join(tensor.strides(), ", "));
  if (is_deferred(tensor)) text += " deferred";
  if (!tensor.is_cpu() && !tensor.is_meta())
    text += " on " + c10::DeviceTypeName(tensor.device().type(), /*lower_case=*/true);
  if (!entry.aliases.empty()) text += fmt::format(" also {}", fmt::join(entry.aliases, ", "));
  return text;
}

}  // namespace

std::vector<NamedTensor> ModuleTensors::trainable() const {
  std::vector<NamedTensor> list;
  std::copy_if(parameters.begin(), parameters.end(), std::back_inserter(list),
               [](const NamedTensor& entry) { return entry.tensor.requires_grad(); });
  return list;
}

std::vector<std::string> ModuleTensors::describe() const {
  std::vector<std::string> lines;
  for (const auto& entry : parameters) {
    lines.push_back(describe_tensor(entry.tensor.requires_grad() ? "parameter" : "frozen parameter", entry));
  }
  for (const auto& entry : buffers) lines.push_back(describe_tensor("buffer", entry));
  return lines;
}

ModuleTensors walk(const torch::nn::Module& module, const std::vector<std::string>& ignored) {
  ModuleTensors tensors{merge(module.named_parameters()), merge(module.named_buffers())};
  const auto weights = weights_of(module);
  for (auto& entry : tensors.parameters) {
    entry.sparse_gradient = weights.sparse.contains(entry.tensor.unsafeGetTensorImpl());
    entry.changes_in_forward = weights.renormalised.contains(entry.tensor.unsafeGetTensorImpl());
  }
  if (const auto* knows = dynamic_cast<const HasTransientBuffers*>(&module)) {
    const auto transient = [&](const std::string& name) { return knows->is_transient(name); };
    for (auto& entry : tensors.buffers) {
      entry.transient = transient(entry.name) && std::all_of(entry.aliases.begin(), entry.aliases.end(), transient);
    }
  }
  const std::set<std::string> names(ignored.begin(), ignored.end());
  auto unknown = names;
  drop_ignored(tensors.parameters, names, unknown);
  drop_ignored(tensors.buffers, names, unknown);
  if (!unknown.empty()) {
    throw UsageError(fmt::format("ignored: the module has no parameter or buffer named {}", fmt::join(unknown, ", ")));
  }
  return tensors;
}

}  // namespace shoal
