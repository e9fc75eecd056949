// Conversion of a model's batch norms to synchronised ones.

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/modules/container/sequential.h>

#include <map>
#include <set>

#include "shoal/error.h"
#include "shoal/sync_batch_norm.h"

namespace shoal {
namespace {

using torch::nn::Module;

template <class Visit>
auto with_batch_norm(const Module& module, const Visit& visit) -> decltype(visit(torch::nn::BatchNorm1dImpl(1))) {
  if (const auto* norm = module.as<torch::nn::BatchNorm1dImpl>()) return visit(*norm);
  if (const auto* norm = module.as<torch::nn::BatchNorm2dImpl>()) return visit(*norm);
  if (const auto* norm = module.as<torch::nn::BatchNorm3dImpl>()) return visit(*norm);
  return {};
}

bool is_batch_norm(const Module& module) {
  return with_batch_norm(module, [](const auto&) { return true; });
}

// Names of batch norms that are not elements of a Sequential, and so cannot be replaced.
std::vector<std::string> out_of_reach(const Module& module, const std::string& prefix) {
  std::vector<std::string> names;
  const bool sequential = module.as<torch::nn::SequentialImpl>() != nullptr;
  for (const auto& child : module.named_children()) {
    if (is_batch_norm(*child.value()) && !sequential) names.push_back(prefix + child.key());
    for (auto& name : out_of_reach(*child.value(), prefix + child.key() + ".")) names.push_back(std::move(name));
  }
  return names;
}

// Replacements, one for each batch norm, even if it occurs several times.
class Replacements {
 public:
  explicit Replacements(const Group& group) : group_(group) {}

  std::shared_ptr<SyncBatchNormImpl> of(const Module& module) {
    auto& made = made_[&module];
    if (!made) {
      made =
          with_batch_norm(module, [&](const auto& norm) { return std::make_shared<SyncBatchNormImpl>(norm, group_); });
    }
    return made;
  }

 private:
  const Group& group_;
  std::map<const Module*, std::shared_ptr<SyncBatchNormImpl>> made_;
};

void replace(Module& module, Replacements& replacements) {
  auto* sequential = module.as<torch::nn::SequentialImpl>();
  size_t place = 0;
  for (const auto& child : module.named_children()) {
    // A Sequential keeps each element twice: as a named child, and as the module that it calls, by index.
    if (sequential != nullptr && is_batch_norm(*child.value())) {
      const auto replacement = replacements.of(*child.value());
      *(sequential->begin() + static_cast<std::ptrdiff_t>(place)) = torch::nn::AnyModule(replacement);
      sequential->replace_module(child.key(), replacement);
    } else {
      replace(*child.value(), replacements);
    }
    ++place;
  }
}

}  // namespace

std::shared_ptr<Module> detail::ConvertSyncBatchNorm::operator()(const std::shared_ptr<Module>& module,
                                                                 const Group& group) const {
  if (!module) throw UsageError("convert_sync_batch_norm: the module is empty");
  Replacements replacements(group);
  if (is_batch_norm(*module)) return replacements.of(*module);
  if (const auto names = out_of_reach(*module, ""); !names.empty()) {
    throw UsageError(
        fmt::format("convert_sync_batch_norm: {}: only elements of a Sequential can be replaced; declare the member as "
                    "shoal::SyncBatchNorm, or move it into a Sequential",
                    fmt::join(names, ", ")));
  }
  replace(*module, replacements);
  return module;
}

}  // namespace shoal
