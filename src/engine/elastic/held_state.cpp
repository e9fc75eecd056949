#include "engine/elastic/held_state.h"

#include <fmt/format.h>
#include <torch/utils.h>

#include <algorithm>
#include <utility>

#include "memory/views.h"
#include "shoal/error.h"

namespace shoal {
namespace {

// The elements of `common` in a tensor that lies as the target's values do.
at::Tensor elements(const at::Tensor& tensor, const UpdateTarget& target, const Range& common) {
  return in_memory_order(tensor).narrow(0, common.begin - target.range.begin, common.size());
}

void copy_elements(const NamedState& from, const UpdateTarget& source, NamedState& to, const UpdateTarget& target) {
  const auto common = source.range.intersect(target.range);
  for (const auto& [name, tensor] : from.tensors) {
    if (tensor.numel() != source.values.numel()) {
      throw UsageError(
          fmt::format("Elastic: an element-wise optimizer (shoal::element_wise) keeps {} elements in '{}' for {} of a "
                      "parameter, which cannot be cut",
                      tensor.numel(), name, source.values.numel()));
    }
    auto& whole = to.tensors[name];
    if (!whole.defined()) {
      whole = at::empty_strided(target.values.sizes(), dense_strides(target.values), tensor.options());
    }
    elements(whole, target, common).copy_(elements(tensor, source, common));
  }
  to.numbers = from.numbers;
}

}  // namespace

template <class Visit>
void HeldState::for_overlaps(const UpdateTarget& target, const Visit& visit) const {
  bool found = target.range.empty();  // ranges of no elements belong to nobody
  for (size_t rank = 0; rank < targets().size(); ++rank) {
    const auto& list = targets()[rank];
    for (size_t i = 0; i < list.size(); ++i) {
      if (!list[i].overlaps(target)) continue;
      found = true;
      visit(list[i], static_cast<int>(rank), i);
    }
  }
  if (!found) throw UsageError("Elastic: a parameter is new, which is not supported");
}

// All elements of a parameter have been updated equally often, whoever owned them.
std::optional<NamedState> HeldState::state_of(const UpdateTarget& target) const {
  std::optional<NamedState> found;
  for_overlaps(target, [&](const UpdateTarget& source, int rank, size_t i) {
    auto held = state(rank, i);
    if (!held) return;
    if (source.range == target.range) {
      found = std::move(held);
      return;
    }
    if (!found) found.emplace();
    copy_elements(*held, source, *found, target);
  });
  return found;
}

void HeldState::copy_values(const UpdateTarget& target) const {
  const torch::NoGradGuard no_grad;
  const auto to = target.values.detach();
  for_overlaps(target, [&](const UpdateTarget& source, int, size_t) {
    const auto common = source.range.intersect(target.range);
    elements(to, target, common).copy_(elements(source.values.detach(), source, common));
  });
}

bool HeldState::has_copies_of(const at::Tensor& parameter) const {
  return std::any_of(targets().begin(), targets().end(), [&](const auto& list) {
    return std::any_of(list.begin(), list.end(), [&](const UpdateTarget& target) {
      return target.rounded.defined() && target.parameter.is_same(parameter);
    });
  });
}

std::optional<NamedState> state_of(const torch::optim::Optimizer& local, const at::Tensor& values) {
  const auto found = local.state().find(values.unsafeGetTensorImpl());
  if (found == local.state().end()) return std::nullopt;
  return named_state(*found->second);
}

std::optional<NamedState> LoneState::state(int rank, size_t target) const {
  return shoal::state_of(*local_, targets_[static_cast<size_t>(rank)][target].values);
}

}  // namespace shoal
