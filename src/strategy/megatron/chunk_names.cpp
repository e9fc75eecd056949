#include "strategy/megatron/chunk_names.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <set>
#include <unordered_map>

#include "module/walk.h"
#include "shoal/error.h"

namespace shoal {
namespace {

std::set<std::string> names_of(const torch::nn::Module& module) {
  std::set<std::string> names;
  for (const auto& item : module.named_parameters()) names.insert(item.key());
  for (const auto& item : module.named_buffers()) names.insert(item.key());
  return names;
}

}  // namespace

std::string chunk_prefix(const Chunks& chunks, size_t number) {
  return chunks.size() > 1 ? fmt::format("chunk{}.", number) : "";
}

std::vector<std::vector<std::string>> ignored_by_chunk(const Chunks& chunks, const std::vector<std::string>& ignored) {
  if (chunks.empty()) throw UsageError("DistributedOptimizer: give at least one module");
  std::set<std::string> unknown(ignored.begin(), ignored.end());
  std::vector<std::vector<std::string>> lists;
  for (size_t number = 0; number < chunks.size(); ++number) {
    if (!chunks[number]) throw UsageError("DistributedOptimizer: a module is nullptr");
    const auto names = names_of(*chunks[number]);
    const auto prefix = chunk_prefix(chunks, number);
    auto& list = lists.emplace_back();
    for (const auto& name : ignored) {
      const bool prefixed = name.starts_with(prefix) && names.count(name.substr(prefix.size())) > 0;
      if (!prefixed && names.count(name) == 0) continue;
      list.push_back(prefixed ? name.substr(prefix.size()) : name);
      unknown.erase(name);
    }
  }
  if (unknown.empty()) return lists;
  throw UsageError(fmt::format("DistributedOptimizer: ignored: {} parameter or buffer named {}",
                               chunks.size() > 1 ? "no chunk has a" : "the module has no", fmt::join(unknown, ", ")));
}

void require_separate(const Chunks& chunks, const std::vector<std::vector<std::string>>& ignored) {
  std::unordered_map<const c10::TensorImpl*, std::string> seen;
  for (size_t number = 0; number < chunks.size(); ++number) {
    for (const auto& entry : walk(*chunks[number], ignored[number]).trainable()) {
      const auto name = chunk_prefix(chunks, number) + entry.name;
      const auto [first, fresh] = seen.emplace(entry.tensor.unsafeGetTensorImpl(), name);
      if (fresh) continue;
      throw UsageError(fmt::format(
          "DistributedOptimizer: parameter {} is also {}, but only one chunk can update it; put the modules that share "
          "it into one chunk, or exclude it from the other chunk with ignored = {{\"{}\"}}",
          first->second, name, name));
    }
  }
}

}  // namespace shoal
