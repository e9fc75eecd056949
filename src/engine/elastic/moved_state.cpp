// State and values of a guarded update that another one takes over, whose ranks own other elements.

#include <fmt/format.h>
#include <torch/utils.h>

#include <utility>

#include "engine/elastic/guarded_update.h"
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
void GuardedUpdate::for_overlaps(const UpdateTarget& target, const Visit& visit) const {
  bool found = false;
  for (int rank = 0; rank < group_.size(); ++rank) {
    const auto& targets = shared_.targets()[static_cast<size_t>(rank)];
    for (size_t i = 0; i < targets.size(); ++i) {
      if (!targets[i].overlaps(target)) continue;
      found = true;
      visit(targets[i], rank, i);
    }
  }
  if (!found) throw UsageError("Elastic: a parameter is new, which is not supported");
}

// All elements of a parameter have been updated equally often, whoever owned them.
std::optional<NamedState> GuardedUpdate::state_of(const UpdateTarget& target) const {
  std::optional<NamedState> found;
  for_overlaps(target, [&](const UpdateTarget& source, int rank, size_t i) {
    auto state = shared_.state(rank, i);
    if (!state) return;
    if (source.range == target.range) {
      found = std::move(state);
      return;
    }
    if (!found) found.emplace();
    copy_elements(*state, source, *found, target);
  });
  return found;
}

void GuardedUpdate::copy_values(const UpdateTarget& target) const {
  const torch::NoGradGuard no_grad;
  const auto to = target.values.detach();
  for_overlaps(target, [&](const UpdateTarget& source, int, size_t) {
    const auto common = source.range.intersect(target.range);
    elements(to, target, common).copy_(elements(source.values.detach(), source, common));
  });
}

void GuardedUpdate::adopt(const GuardedUpdate& former) {
  const torch::NoGradGuard no_grad;
  const auto& own = shared_.targets()[static_cast<size_t>(group_.rank())];
  for (size_t i = 0; i < own.size(); ++i) {
    const auto state = former.state_of(own[i]);
    if (!state) continue;
    shared_.keep(group_.rank(), i, *state);
    take_state(i);
  }
}

void GuardedUpdate::release(const GuardedUpdate& former, const std::vector<UpdateTarget>& own,
                            torch::optim::Optimizer& local) {
  const torch::NoGradGuard no_grad;
  for (const auto& target : own) {
    auto state = former.state_of(target);
    if (!state) continue;
    for (auto& [name, tensor] : state->tensors) tensor = tensor.clone();
    local.state()[target.values.unsafeGetTensorImpl()] = make_state(local, *state);
  }
}

}  // namespace shoal
