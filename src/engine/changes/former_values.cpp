#include "engine/changes/former_values.h"

#include <torch/utils.h>

#include <vector>

namespace shoal {
namespace {

// Part by part, because what is compared takes memory, too.
std::vector<at::Tensor> parts(const at::Tensor& tensor) {
  constexpr int64_t at_once = int64_t{1} << 20;
  return (tensor.dim() == 0 ? tensor.unsqueeze(0) : tensor).split(at_once);
}

// Where elements are not what their copy rounds to.
at::Tensor written(const at::Tensor& elements, const at::Tensor& copy) {
  return elements != copy.to(elements.scalar_type());
}

bool any_written(const at::Tensor& elements, const at::Tensor& copy) {
  const auto now = parts(elements);
  const auto exact = parts(copy);
  for (size_t i = 0; i < exact.size(); ++i) {
    if (written(now[i], exact[i]).any().item<bool>()) return true;
  }
  return false;
}

}  // namespace

void take_written(const at::Tensor& elements, const at::Tensor& copy) {
  const auto now = parts(elements);
  const auto exact = parts(copy.detach());
  for (size_t i = 0; i < exact.size(); ++i) {
    exact[i].copy_(at::where(written(now[i], exact[i]), now[i].to(exact[i].scalar_type()), exact[i]));
  }
}

void FormerValues::show(const at::Tensor& elements, const at::Tensor& copy, bool replaced) const {
  if (!former_->defined()) return take_written(elements, copy);
  const auto now = parts(elements);
  const auto exact = parts(copy.detach());
  const auto former = parts(*former_);
  for (size_t i = 0; i < exact.size(); ++i) {
    const auto changed = written(now[i], exact[i]);
    auto back = written(now[i], former[i]).logical_not_();
    if (!replaced) back.logical_and_(changed);
    exact[i].copy_(at::where(changed, now[i].to(exact[i].scalar_type()), exact[i]));
    exact[i].copy_(at::where(back, former[i], exact[i]));
  }
}

void FormerValues::take(const at::Tensor& elements, const at::Tensor& copy, bool replaced) const {
  const bool may_be_back = replaced && former_->defined();
  if (!may_be_back && !any_written(elements, copy.detach())) return;
  keep(copy);
  show(elements, copy, replaced);
  drop_if(copy);
}

void FormerValues::give(const at::Tensor& values, const at::Tensor& copy) const {
  keep(copy);
  copy.detach().copy_(values);
  drop_if(copy);
}

void FormerValues::keep(const at::Tensor& copy) const {
  if (!former_->defined()) *former_ = copy.detach().clone();
}

void FormerValues::drop_if(const at::Tensor& copy) const {
  if (at::equal(copy.detach(), *former_)) former_->reset();
}

}  // namespace shoal
