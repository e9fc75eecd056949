#include "engine/changes/separate_memory.h"

#include <fmt/format.h>
#include <torch/utils.h>

#include <algorithm>
#include <unordered_map>

#include "engine/changes/operator_watch.h"
#include "shoal/deferred_init.h"
#include "shoal/error.h"

namespace shoal {
namespace {

// Elements of a strided tensor in its storage, from the first to the last.
struct Extent {
  int64_t begin;
  int64_t end;
};

Extent extent_of(const at::Tensor& tensor) {
  int64_t last = tensor.storage_offset();
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  return {tensor.storage_offset(), last + 1};
}

// Whether two tensors on one storage have an element in common. Parts of one tensor may interleave, such as chunks of
// its columns.
bool overlap(const at::Tensor& a, const at::Tensor& b) {
  const auto one = extent_of(a);
  const auto other = extent_of(b);
  const auto bytes_of_a = static_cast<int64_t>(a.element_size()), bytes_of_b = static_cast<int64_t>(b.element_size());
  if (one.end * bytes_of_a <= other.begin * bytes_of_b || other.end * bytes_of_b <= one.begin * bytes_of_a)
    return false;
  if (bytes_of_a != bytes_of_b) return true;
  const auto mask = at::zeros({std::max(one.end, other.end)}, at::kBool);
  mask.as_strided(a.sizes(), a.strides(), a.storage_offset()).fill_(true);
  return mask.as_strided(b.sizes(), b.strides(), b.storage_offset()).any().item<bool>();
}

}  // namespace

void require_separate_memory(const std::vector<NamedTensor>& parameters, const std::vector<NamedTensor>& buffers,
                             const std::string& wrapper) {
  const torch::NoGradGuard no_grad;
  const UnwatchedOperators own;
  std::unordered_map<const c10::StorageImpl*, std::vector<const NamedTensor*>> on;
  const auto compare = [&](const NamedTensor& entry, bool add) {
    if (is_deferred(entry.tensor) || entry.tensor.numel() == 0) return;
    auto& others = on[entry.tensor.storage().unsafeGetStorageImpl()];
    for (const auto* other : others) {
      if (!overlap(other->tensor, entry.tensor)) continue;
      throw UsageError(fmt::format(
          "{}: {} and {} are two tensors on the same memory, but parameters get other memory, and one of the two would "
          "be left behind: use one tensor in both places (in Python b.weight = a.weight; in C++ "
          "register_parameter(\"weight\", a->weight) in a module of your own, since a torch::nn module keeps the "
          "tensor that it has registered when its member weight is assigned), or copy it (clone())",
          wrapper, other->name, entry.name));
    }
    if (add) others.push_back(&entry);
  };
  for (const auto& parameter : parameters) compare(parameter, true);
  for (const auto& buffer : buffers) compare(buffer, false);
}

void separate(const std::vector<NamedTensor>& parameters, const std::vector<at::Tensor>& replaced,
              const std::string& owner) {
  require_separate_memory(parameters, {}, owner);
  for (const auto& parameter : replaced) {
    if (is_watchable(parameter)) parameter.set_data(parameter.detach().clone());
  }
}

}  // namespace shoal
