#include "engine/gradients/earlier_sums.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/utils.h>

#include <algorithm>

#include "memory/views.h"
#include "shoal/error.h"

namespace shoal {
namespace {

using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

}  // namespace

EarlierSums::EarlierSums(const std::vector<Gradient>& gradients, const BucketSet& buckets, std::string about)
    : gradients_(gradients),
      buckets_(buckets),
      stand_ins_(gradients, std::move(about)),
      where_(gradients.size()),
      aside_(gradients.size()),
      zero_(gradients.size()),
      nonzero_(gradients.size()),
      whole_(gradients.size()),
      outside_buckets_(gradients.size(), Weak(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>())),
      hidden_(gradients.size()),
      spoilt_(gradients.size()) {}

void EarlierSums::start() {
  bucket_aside_.assign(buckets_.size(), false);
  parts_.assign(buckets_.size(), {});
  held_.assign(buckets_.size(), {});
}

// Whether grad() is the tensor that the last step left there.
bool EarlierSums::is_left(size_t gradient) const {
  if (!grad(gradient).defined()) return false;
  if (outside_buckets_[gradient].lock().get() == grad(gradient).unsafeGetTensorImpl()) return true;
  return !bucket_of(gradient).sparse() && same_storage(grad(gradient), bucket_of(gradient).flat());
}

at::Tensor EarlierSums::own(size_t gradient, const at::Tensor& kept) const {
  const auto& bucket = bucket_of(gradient);
  const auto range = bucket.layout().range(place(gradient).index).intersect(bucket.kept_range());
  return kept.narrow(0, range.empty() ? 0 : range.begin - bucket.kept_range().begin, range.size());
}

void EarlierSums::adopt_changes() {
  show_hidden();
  for (size_t i = 0; i < gradients_.size(); ++i) {
    if (where_[i] == Where::none) continue;
    // A parameter without elements has no stand-in.
    if (where_[i] == Where::part && grad(i).defined() && gradients_[i].parameter.numel() == 0) continue;
    if (stands_in(i)) {
      if (!stand_ins_.zeroed(i)) continue;
      stand_ins_.renew(i);
      zero(i);
    } else if (!is_left(i) || (where_[i] == Where::part && !aside_[i])) {
      drop(i);
    } else if (aside_[i] && nonzero_[i] && is_zero(grad(i))) {
      zero(i);
    }
  }
}

void EarlierSums::hide(size_t gradient) {
  const auto& bucket = bucket_of(gradient);
  if (bucket.sparse() || !bucket.present() || !grad(gradient).defined()) return;
  if (!same_view(grad(gradient), bucket.view(place(gradient).index))) return;
  hidden_[gradient] = true;
  stand_ins_.put(gradient);
}

void EarlierSums::show_hidden() {
  for (size_t i = 0; i < gradients_.size(); ++i) {
    if (!hidden_[i]) continue;
    hidden_[i] = false;
    if (!stands_in(i)) continue;  // the caller dropped or replaced it
    const auto& view = bucket_of(i).view(place(i).index);
    if (stand_ins_.zeroed(i)) {
      at::Tensor(view).zero_();
      if (where_[i] != Where::none) zero(i);
    }
    mutable_grad(i) = view;
  }
}

void EarlierSums::zero(size_t gradient) {
  spoilt_[gradient] = Spoilt::no;
  if (!aside_[gradient]) {
    zero_[gradient] = true;
    return;
  }
  if (whole_[gradient].defined()) whole_[gradient].zero_();
  const auto bucket = place(gradient).bucket;
  for (const auto& memory : {parts_[bucket], held_[bucket]}) {
    if (memory.defined()) own(gradient, memory).zero_();
  }
}

void EarlierSums::drop(size_t gradient) {
  zero(gradient);
  where_[gradient] = Where::none;
  aside_[gradient] = zero_[gradient] = false;
  whole_[gradient].reset();
  const auto index = place(gradient).bucket;
  const auto& members = buckets_[index].members();
  if (std::any_of(members.begin(), members.end(), [&](size_t member) { return where_[member] == Where::part; })) return;
  bucket_aside_[index] = false;
  parts_[index].reset();
  held_[index].reset();
}

void EarlierSums::drop_all() {
  show_hidden();
  for (size_t i = 0; i < gradients_.size(); ++i) {
    if (where_[i] == Where::none) continue;
    if (stands_in(i)) mutable_grad(i).reset();
    drop(i);
  }
}

void EarlierSums::set_aside(size_t gradient) {
  if (where_[gradient] == Where::none) return;
  if (where_[gradient] == Where::part) {
    if (!bucket_aside_[place(gradient).bucket]) set_bucket_aside(place(gradient).bucket);
    if (stands_in(gradient)) mutable_grad(gradient).reset();
  } else if (!aside_[gradient]) {
    aside_[gradient] = true;
    whole_[gradient] = grad(gradient).clone();
    mutable_grad(gradient).reset();
  }
}

// Sets the whole bucket aside at once, because the next reduction overwrites all of it.
void EarlierSums::set_bucket_aside(size_t index) {
  const auto& bucket = buckets_[index];
  const auto counts = [this](size_t member) {
    return where_[member] == Where::part && !zero_[member] && spoilt_[member] != Spoilt::for_use;
  };
  const auto& members = bucket.members();
  bucket_aside_[index] = true;
  if (!bucket.kept_range().empty() && std::any_of(members.begin(), members.end(), counts)) {
    parts_[index] = bucket.kept().clone();
    for (const auto member : members) {
      if (!counts(member)) own(member, parts_[index]).zero_();
    }
  }
  for (const auto member : members) {
    aside_[member] = where_[member] == Where::part;
    zero_[member] = false;
  }
}

void EarlierSums::added(size_t gradient) {
  if (aside_[gradient]) nonzero_[gradient] = grad(gradient).defined() && !is_zero(grad(gradient));
}

void EarlierSums::show_aside() {
  for (size_t i = 0; i < gradients_.size(); ++i) {
    if (!aside_[i]) continue;
    if (where_[i] == Where::part) {
      stand_ins_.put(i);
    } else {
      mutable_grad(i) = whole_[i];
      leave_outside_bucket(i);
    }
  }
}

void EarlierSums::put_back() {
  for (size_t i = 0; i < gradients_.size(); ++i) {
    if (!aside_[i]) continue;
    aside_[i] = false;
    if (where_[i] == Where::part) {
      zero_[i] = !parts_[place(i).bucket].defined();
      stand_ins_.put(i);
      continue;
    }
    if (bucket_of(i).sparse()) {
      leave_sparse(i, {});
      continue;
    }
    const auto& view = bucket_of(i).view(place(i).index);
    auto whole = std::exchange(whole_[i], {});
    at::Tensor(view).copy_(whole);
    const bool converted = whole.scalar_type() != view.scalar_type();
    mutable_grad(i) = converted ? whole : view;
    if (converted) leave_outside_bucket(i);
  }
  for (size_t index = 0; index < buckets_.size(); ++index) {
    if (parts_[index].defined()) buckets_[index].kept().copy_(std::exchange(parts_[index], {}));
    bucket_aside_[index] = false;
  }
}

void EarlierSums::leave_parts(size_t index, const std::vector<bool>& used) {
  const auto& bucket = buckets_[index];
  if (auto part = std::exchange(parts_[index], {}); part.defined()) bucket.kept().add_(part);
  bucket_aside_[index] = false;
  for (const auto member : bucket.members()) {
    aside_[member] = zero_[member] = false;
    if (!used[member] && where_[member] == Where::none) continue;
    where_[member] = Where::part;
    if (used[member] && spoilt_[member] != Spoilt::no) spoilt_[member] = Spoilt::for_use;
    stand_ins_.put(member);
  }
}

bool EarlierSums::leave_whole(size_t gradient, at::Tensor sum, bool used) {
  const auto before = std::exchange(whole_[gradient], {});
  aside_[gradient] = false;
  if (before.defined()) sum.add_(before);
  where_[gradient] = used || before.defined() ? Where::whole : Where::none;
  return where_[gradient] == Where::whole;
}

void EarlierSums::leave_outside_bucket(size_t gradient) {
  outside_buckets_[gradient] = Weak(grad(gradient).getIntrusivePtr());
}

void EarlierSums::leave_sparse(size_t gradient, const at::Tensor& sum) {
  const auto before = std::exchange(whole_[gradient], {});
  aside_[gradient] = false;
  const auto all = sum.defined() && before.defined() ? sum_of(sum, before) : sum.defined() ? sum : before;
  where_[gradient] = all.defined() ? Where::whole : Where::none;
  if (!all.defined()) return;
  mutable_grad(gradient) = all;
  leave_outside_bucket(gradient);
}

void EarlierSums::resume(size_t gradient, const Left& left, bool here) {
  if (!left.exists) return;
  const auto bucket = place(gradient).bucket;
  if (!here) {
    where_[gradient] = Where::part;
    aside_[gradient] = grad(gradient).defined();
    if (!aside_[gradient]) return stand_ins_.put(gradient);
    bucket_aside_[bucket] = true;
  } else if (left.aside.defined()) {
    where_[gradient] = Where::whole;
    aside_[gradient] = true;
    whole_[gradient] = left.aside;
  } else if (grad(gradient).defined()) {
    where_[gradient] = Where::whole;
    if (buckets_[bucket].sparse() || gradients_[gradient].reduce_dtype) leave_outside_bucket(gradient);
  }
}

EarlierSums::Remains EarlierSums::remains(size_t gradient) const {
  if (!grad(gradient).defined()) return Remains::nothing;
  const bool zeroed = stands_in(gradient) && (zero_[gradient] || stand_ins_.zeroed(gradient));
  return zeroed ? Remains::zeros : Remains::values;
}

void EarlierSums::leave(size_t gradient, Remains remains, const std::string& why) {
  if (remains == Remains::nothing) return;
  where_[gradient] = Where::part;
  zero_[gradient] = remains == Remains::zeros;
  const bool usable = remains == Remains::zeros || gradients_[gradient].parameter.numel() == 0;
  spoilt_[gradient] = usable ? Spoilt::no : Spoilt::for_use;
  why_spoilt_ = why;
  stand_ins_.put(gradient);
}

void EarlierSums::hold(size_t index, const std::vector<bool>& used) {
  const auto& bucket = buckets_[index];
  if (!bucket.kept_range().empty()) {
    const auto sum = bucket.kept();
    held_[index] = held_[index].defined() ? held_[index].add_(sum) : sum.clone();
  }
  bucket_aside_[index] = true;
  for (const auto member : bucket.members()) {
    if (used[member]) where_[member] = Where::part;
    if (where_[member] == Where::none) {
      if (held_[index].defined()) own(member, held_[index]).zero_();  // a gradient that no rank used has no sum
      continue;
    }
    aside_[member] = true;
    stand_ins_.put(member);
  }
}

bool EarlierSums::holds_any() const {
  return std::any_of(held_.begin(), held_.end(), [](const at::Tensor& held) { return held.defined(); });
}

bool EarlierSums::unsettled() const {
  const auto any = [](const std::vector<bool>& flags) {
    return std::find(flags.begin(), flags.end(), true) != flags.end();
  };
  return any(aside_) || any(zero_);
}

void EarlierSums::write_zeroes() {
  for (size_t i = 0; i < gradients_.size(); ++i) {
    if (!zero_[i]) continue;
    zero_[i] = false;
    if (!bucket_of(i).kept_range().empty()) own(i, bucket_of(i).kept()).zero_();
  }
}

void EarlierSums::adopt(size_t gradient) {
  const auto& parameter = gradients_[gradient].parameter;
  const auto& bucket = bucket_of(gradient);
  auto values = grad(gradient).detach();
  if (values.sizes() != parameter.sizes()) {
    throw UsageError(
        fmt::format("the gradient of parameter {} has the shape [{}], the parameter [{}]; set grad() to a "
                    "tensor of the parameter's shape",
                    gradients_[gradient].name, fmt::join(values.sizes(), ", "), fmt::join(parameter.sizes(), ", ")));
  }
  if (!bucket.kept_range().empty()) {
    const auto range = bucket.layout().range(place(gradient).index);
    const auto mine = range.intersect(bucket.kept_range());
    auto laid_out =
        at::empty_strided(parameter.sizes(), dense_strides(parameter), values.options().layout(at::kStrided));
    laid_out.copy_(values.is_sparse() ? values.to_dense() : values);
    own(gradient, bucket.kept())
        .copy_(in_memory_order(laid_out).narrow(0, mine.empty() ? 0 : mine.begin - range.begin, mine.size()));
  }
  where_[gradient] = Where::part;
  aside_[gradient] = zero_[gradient] = false;
  spoilt_[gradient] = Spoilt::no;
  stand_ins_.put(gradient);
}

void EarlierSums::spoil(std::string why, bool add_only) {
  why_spoilt_ = std::move(why);
  for (size_t i = 0; i < gradients_.size(); ++i) {
    if (gradients_[i].parameter.numel() == 0) continue;  // nobody sees whether it was zeroed since
    if (where_[i] == Where::part && !zero_[i]) spoilt_[i] = add_only ? Spoilt::for_adding : Spoilt::for_use;
  }
}

void EarlierSums::require_usable() const {
  for (size_t i = 0; i < gradients_.size(); ++i) {
    if (spoilt_[i] == Spoilt::for_use) refuse(i);
  }
}

void EarlierSums::require_addable() const {
  for (size_t i = 0; i < gradients_.size(); ++i) {
    if (spoilt_[i] != Spoilt::no) refuse(i);
  }
}

void EarlierSums::refuse(size_t gradient) const {
  throw UsageError(fmt::format("the gradient of parameter {} {}", gradients_[gradient].name, why_spoilt_));
}

}  // namespace shoal
