#include "strategy/decentralized/bucket.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/utils.h>

#include "memory/other_memory.h"
#include "memory/views.h"
#include "shoal/error.h"

namespace shoal {
namespace {

FlatLayout layout_of(const std::vector<NamedParameter>& members) {
  std::vector<int64_t> numels;
  for (const auto& member : members) numels.push_back(member.parameter.numel());
  return {numels, members.front().parameter.dtype().itemsize()};
}

}  // namespace

at::Tensor home_of(const at::Tensor& parameter) {
  const torch::NoGradGuard no_grad;
  const auto memory = in_memory_order(parameter);
  auto home = at::empty({0}, memory.options());
  home.set_(c10::Storage(c10::Storage::use_byte_size_t(), static_cast<int64_t>(memory.nbytes()), pointer_to(memory),
                         /*allocator=*/nullptr, /*resizable=*/false),
            0, parameter.sizes(), dense_strides(parameter));
  parameter.set_data(home);
  return home;
}

GossipBucket::GossipBucket(std::vector<NamedParameter> members, std::vector<at::Tensor> homes)
    : members_(std::move(members)),
      homes_(std::move(homes)),
      layout_(layout_of(members_)),
      dtype_(members_.front().parameter.scalar_type()) {
  if (homes_.empty()) return;
  const torch::NoGradGuard no_grad;
  const auto flat = aligned_zeros(numel(), members_.front().parameter.options().requires_grad(false));
  write_to(flat);
  for (size_t i = 0; i < members_.size(); ++i) {
    give_other_memory(homes_[i], flat.narrow(0, layout_.range(i).begin, layout_.range(i).size()));
  }
  flat_ = flat;
}

std::vector<at::Tensor> GossipBucket::views_of(const at::Tensor& flat) const {
  std::vector<at::Tensor> views;
  for (size_t i = 0; i < members_.size(); ++i) {
    views.push_back(view_like(flat, layout_.range(i).begin, members_[i].parameter));
  }
  return views;
}

void GossipBucket::require_kinds() const {
  for (size_t i = 0; i < members_.size(); ++i) {
    const auto& [name, parameter] = members_[i];
    if (parameter.scalar_type() == dtype_ && parameter.numel() == layout_.range(i).size()) continue;
    throw UsageError(
        fmt::format("DecentralizedDataParallel: parameter {} is {} [{}] now; neighbours average {} elements of {}. "
                    "Revert the change (module.to(dtype)), or wrap the module again",
                    name, c10::toString(parameter.scalar_type()), fmt::join(parameter.sizes(), ", "),
                    layout_.range(i).size(), c10::toString(dtype_)));
  }
}

bool GossipBucket::any_moved() const {
  for (size_t i = 0; i < members_.size(); ++i) {
    const auto& range = layout_.range(i);
    const auto* place = static_cast<const std::byte*>(flat_.const_data_ptr()) + range.begin * flat_.element_size();
    if (!range.empty() && homes_[i].storage().data() != place) return true;
  }
  return false;
}

void GossipBucket::adopt() {
  require_kinds();
  if (!flat_.defined()) return;
  if (any_moved()) {
    flat_.reset();
    return;
  }
  const torch::NoGradGuard no_grad;
  for (size_t i = 0; i < members_.size(); ++i) {
    auto& parameter = members_[i].parameter;
    if (same_storage(parameter, homes_[i])) continue;
    const auto view = view_like(homes_[i], 0, parameter);
    at::Tensor(view).copy_(parameter);
    parameter.set_data(view);
  }
}

// Computed as x + (others - (1 - own) x), because rounded weights do not sum to 1, and equal ranks would drift.
void GossipBucket::mix(double own, at::Tensor& others) {
  if (flat_.defined()) {
    flat_.add_(others.sub_(flat_, 1 - own));
    return;
  }
  auto views = views_of(others);
  for (size_t i = 0; i < members_.size(); ++i) {
    members_[i].parameter.add_(views[i].sub_(members_[i].parameter, 1 - own));
  }
}

void GossipBucket::write_to(const at::Tensor& flat, double scale) const {
  if (flat_.defined()) {
    flat.copy_(flat_);
  } else {
    const auto views = views_of(flat);
    for (size_t i = 0; i < members_.size(); ++i) at::Tensor(views[i]).copy_(members_[i].parameter);
  }
  if (scale != 1) at::Tensor(flat).mul_(scale);
}

void GossipBucket::read_from(const at::Tensor& flat) {
  if (flat_.defined()) {
    flat_.copy_(flat);
    return;
  }
  const auto views = views_of(flat);
  for (size_t i = 0; i < members_.size(); ++i) members_[i].parameter.copy_(views[i]);
}

}  // namespace shoal
