#include "engine/gradients/accumulated_gradients.h"

#include <fmt/format.h>
#include <torch/utils.h>

#include <algorithm>

#include "engine/gradients/forward_turns.h"
#include "engine/gradients/local_gradients.h"
#include "memory/views.h"
#include "shoal/error.h"

namespace shoal {

AccumulatedGradients::AccumulatedGradients(const std::vector<Gradient>& gradients, BucketSet& buckets,
                                           const Options& options)
    : gradients_(gradients),
      buckets_(buckets),
      in_buckets_(options.in_buckets),
      everywhere_(options.everywhere),
      own_(gradients.size()),
      means_(gradients.size()),
      versions_(gradients.size()),
      sums_(gradients, buckets, options.about_sums),
      shown_(gradients.size()) {}

// The gradients keep the old memory until they have moved out of it. They stay in it if the program has other tensors
// there.
void AccumulatedGradients::move_to(std::vector<Bucket> before) {
  before.clear();
  sums_.start();
  if (!in_buckets_) return;
  if (everywhere_) shown_.note_all(gradients_);
  for (size_t i = 0; i < gradients_.size(); ++i) {
    if (belongs_in_bucket(i)) lay_in_bucket(i);
  }
}

// A conversion of the module (channels-last) gives grad() other memory, and grad() may be the tensor that the bucket
// keeps as its view. Makes the view again, with the values; a local gradient stays marked as one.
void AccumulatedGradients::return_moved() {
  for (size_t i = 0; i < gradients_.size(); ++i) {
    auto& bucket = buckets_.of(i);
    const auto place = buckets_.places()[i].index;
    if (bucket.sparse() || !bucket.flat().defined() || !bucket.moved(place)) continue;
    const auto moved = bucket.view(place);
    bucket.renew_view(place);
    const auto& parameter = gradients_[i].parameter;
    if (!parameter.grad().is_same(moved)) continue;
    const bool local = has_local_gradient(parameter);
    at::Tensor(bucket.view(place)).copy_(moved.detach());
    show(i, bucket.view(place));
    if (local) mark_local(parameter);
  }
}

void AccumulatedGradients::adopt_changes() {
  if (!everywhere_) return_moved();
  std::vector<bool> zeroed(gradients_.size());  // through stand-ins, which are renewed
  for (size_t i = 0; i < gradients_.size() && own_.weight; ++i) {
    zeroed[i] = sums_.remains(i) == EarlierSums::Remains::zeros;
  }
  sums_.adopt_changes();
  bool some = false;
  for (size_t i = 0; i < gradients_.size(); ++i) {
    some = some || own_.used[i];
    const bool defined = gradients_[i].parameter.grad().defined();
    own_.used[i] = own_.used[i] && defined;
    own_.had[i] = own_.had[i] && defined;
    means_[i] = means_[i] && defined && (own_.used[i] || !changed(i));
    if (own_.means[i].defined() && (!defined || has_zeros(i))) own_.means[i].reset();
  }
  if (own_.weight && some && !any_left([&](size_t i) { return !zeroed[i] && !was_zeroed(i); })) {
    own_.weight.reset();
  }
  for (size_t i = 0; i < buckets_.size() && everywhere_ && in_buckets_; ++i) leave_what_is_kept(i);
  shown_.end_backward();
}

// The last layers' first, which are rarely zero.
bool AccumulatedGradients::any_left(const std::function<bool(size_t)>& is_left) const {
  for (size_t i = gradients_.size(); i-- > 0;) {
    if (own_.used[i] && is_left(i)) return true;
  }
  return false;
}

// Gradients that were dropped come again, in the bucket: what the program keeps of them (grad() itself, a view, an
// array of NumPy) keeps the memory. Where all are still in grad(), what the program keeps follows them.
void AccumulatedGradients::leave_what_is_kept(size_t bucket) {
  auto& memory = buckets_[bucket];
  if (!memory.flat().defined() || !(memory.kept_by_program(0) || memory.lost_memory())) return;
  std::vector<size_t> inside;
  size_t tensors = 0;
  bool dropped = memory.lost_memory();
  for (size_t place = 0; place < memory.members().size(); ++place) {
    const auto member = memory.members()[place];
    const auto& grad = gradients_[member].parameter.grad();
    if (same_view(grad, memory.view(place))) {
      inside.push_back(place);
      tensors += grad.is_same(memory.view(place)) ? 0 : 1;
    } else {
      dropped = dropped || shown_.was_shown(member);
    }
  }
  if (!dropped || !(memory.kept_by_program(tensors) || memory.lost_memory())) return;
  buckets_.leave_memory(bucket);
  for (const auto place : inside) mutable_grad(memory.members()[place]).set_data(memory.view(place));
}

void AccumulatedGradients::keep_mean(size_t gradient) {
  if (!means_[gradient] || own_.used[gradient]) return;
  const auto& grad = gradients_[gradient].parameter.grad();
  if (grad.defined()) own_.means[gradient] = grad.detach().clone();
}

at::Tensor AccumulatedGradients::mean(size_t gradient) const {
  if (!means_[gradient]) return {};
  const auto& grad = gradients_[gradient].parameter.grad();
  return own_.used[gradient] || !grad.defined() ? own_.means[gradient] : grad.detach();
}

void AccumulatedGradients::note_mean(size_t gradient) {
  means_[gradient] = true;
  note_version(gradient);
}

void AccumulatedGradients::note_values() {
  own_.nonzero = any_left([this](size_t gradient) { return !has_zeros(gradient); });
  for (size_t i = 0; i < gradients_.size(); ++i) {
    if (own_.used[i]) note_version(i);
  }
}

void AccumulatedGradients::note_arrival(size_t gradient) {
  own_.came[gradient] = true;
  if (everywhere_) shown_.note_graph(gradient, gradients_[gradient].parameter.grad());
  if (gradients_[gradient].parameter.grad().defined()) own_.used[gradient] = true;
}

void AccumulatedGradients::note_local(size_t gradient) {
  if (in_buckets_ || gradients_[gradient].reduce_dtype) lay_in_bucket(gradient);
  sums_.added(gradient);
  mark(gradient);
}

void AccumulatedGradients::mark(size_t gradient) {
  marked_ = true;
  if (gradients_[gradient].parameter.grad().defined()) mark_local(gradients_[gradient].parameter);
}

void AccumulatedGradients::unmark() {
  if (!std::exchange(marked_, false)) return;
  for (const auto& gradient : gradients_) unmark_local(gradient.parameter);
}

void AccumulatedGradients::note_set() {
  for (size_t i = 0; i < gradients_.size(); ++i) {
    if (!sums_.is_sum(i) && gradients_[i].parameter.grad().defined()) own_.used[i] = true;
  }
}

void AccumulatedGradients::hide() {
  for (size_t i = 0; i < gradients_.size(); ++i) {
    if (own_.used[i]) sums_.hide(i);
  }
}

// Moves the gradient into its bucket, so that there is one copy of it.
void AccumulatedGradients::lay_in_bucket(size_t gradient) {
  auto& grad = mutable_grad(gradient);
  if (buckets_.of(gradient).sparse() || !grad.defined() || sums_.stands_in(gradient)) return;
  if (shown_.elsewhere(gradient)) return;
  const auto& view = buckets_.acquire(gradient);
  if (same_view(grad, view)) {
    if (everywhere_) show(gradient, view);  // it was in this backward, too
    return;
  }
  view.copy_(grad.is_sparse() ? grad.to_dense() : grad.detach());
  show(gradient, view);
}

void AccumulatedGradients::note_arriving(size_t gradient) {
  const auto& bucket = buckets_.of(gradient);
  const auto& grad = gradients_[gradient].parameter.grad();
  if (!own_.came[gradient]) own_.had[gradient] = grad.defined();
  if ((everywhere_ && !in_buckets_) || bucket.sparse() || sums_.stands_in(gradient)) return;
  if (!shown_.note(gradient, grad, bucket.flat()) || everywhere_) return;
  throw UsageError(fmt::format(
      "the gradient of {} lies in memory that the program has given it and other tensors share (a part of a "
      "flat tensor): they would not get the sums over the ranks, which lie elsewhere; let backward make "
      "gradients, after zero_grad()",
      gradients_[gradient].name));
}

// The marks of local gradients and of sums count on the bucket's own tensor.
void AccumulatedGradients::show(size_t gradient, const at::Tensor& view) {
  auto& grad = mutable_grad(gradient);
  const bool before = changed(gradient);
  if (everywhere_) {
    shown_.show(gradient, grad, view);
  } else {
    grad = view;
  }
  if (!before) note_version(gradient);
}

void AccumulatedGradients::leave_mean(size_t gradient, const at::Tensor& view) {
  auto& grad = mutable_grad(gradient);
  const bool own = !in_buckets_ || shown_.elsewhere(gradient);
  if (!own) {
    show(gradient, view);
  } else if (grad.defined() && grad.layout() == at::kStrided) {
    grad.detach().copy_(view);
  } else {
    grad = view.clone();
  }
}

at::Tensor AccumulatedGradients::hand_over(size_t gradient, double scale) {
  const auto& view = buckets_.acquire(gradient);
  auto& grad = mutable_grad(gradient);
  sums_.set_aside(gradient);
  if (!grad.defined()) {
    view.zero_();
    return {};
  }
  // A backward may be of several wrappers, each of which takes this rank's own gradient from grad().
  const bool shared = ForwardTurns::are_shared(gradients_[gradient].parameter);
  if (shared && same_view(grad, view)) {
    if (grad.requires_grad()) grad = grad.detach();
    grad.set_data(view.clone());
  }
  if (same_view(grad, view)) {
    const auto untouched = own_.used[gradient] ? at::Tensor() : view.clone();
    if (scale != 1) at::Tensor(view).mul_(scale);
    return untouched;
  }
  const auto dense = grad.is_sparse() ? grad.to_dense() : grad.detach();
  if (scale != 1 && dense.scalar_type() == view.scalar_type()) {
    auto out = view;
    at::mul_out(out, dense, at::scalar_tensor(scale, dense.options().dtype(at::kDouble)));
  } else {
    at::Tensor(view).copy_(dense).mul_(scale);
  }
  if (in_buckets_ && own_.used[gradient] && !shared && !shown_.elsewhere(gradient)) show(gradient, view);
  return {};
}

at::Tensor AccumulatedGradients::local(size_t gradient) {
  sums_.set_aside(gradient);  // the bucket may still hold this rank's part of the last sum
  const auto view = buckets_.acquire(gradient);
  if (own_.used[gradient] && gradients_[gradient].parameter.grad().defined()) {
    lay_in_bucket(gradient);
  } else {
    at::Tensor(view).zero_();
    show(gradient, view);
    own_.used[gradient] = true;
  }
  sums_.added(gradient);
  marked_ = true;
  return view;
}

void AccumulatedGradients::give_up(size_t gradient, bool in_flight) {
  auto& grad = mutable_grad(gradient);
  if (!grad.defined()) return;
  const bool came = own_.came[gradient] || own_.used[gradient];
  if (came && !own_.had[gradient]) {
    grad.reset();
  } else if (in_flight && same_storage(grad, buckets_.of(gradient).flat())) {
    shown_.show(gradient, grad, at::zeros_like(grad, at::TensorOptions().requires_grad(false)));
  } else {
    grad.zero_();
  }
}

void AccumulatedGradients::drop_own(size_t gradient) {
  if (sums_.is_sum(gradient)) return;
  auto& grad = mutable_grad(gradient);
  if (own_.used[gradient] || same_storage(grad, buckets_.of(gradient).flat())) grad.reset();
}

void AccumulatedGradients::require_none_local(const std::string& who) const {
  for (size_t i = 0; i < gradients_.size() && marked_; ++i) {
    require_no_local_gradient(gradients_[i].parameter, who, gradients_[i].name);
  }
}

void AccumulatedGradients::prepare_sums(const std::string& who, const std::function<void()>& before_writing) {
  if (sums_.holds_any()) {
    throw UsageError(
        "gradients of micro-batches are summed within hosts only, not over all ranks: run the last micro-batch's "
        "backward outside defer_all_reduce(), or drop them with zero_grad()");
  }
  sums_.require_usable();
  require_none_local(who);
  if (sums_.unsettled()) {
    before_writing();
    sums_.put_back();
    sums_.write_zeroes();
  }
  for (size_t i = 0; i < gradients_.size(); ++i) {
    if (sums_.has_part(i) || !gradients_[i].parameter.grad().defined()) continue;
    before_writing();
    sums_.require_addable();
    sums_.adopt(i);
  }
}

AccumulatedGradients::Left AccumulatedGradients::left() const {
  Left left{.weight = own_.weight, .nonzero = own_.nonzero};
  for (size_t i = 0; i < gradients_.size(); ++i) {
    left.gradients[gradients_[i].parameter.unsafeGetTensorImpl()] = {sums_.left(i), own_.used[i], means_[i],
                                                                     own_.means[i]};
  }
  return left;
}

void AccumulatedGradients::resume(const Left& left, const std::function<bool(const Bucket&)>& keeps_whole) {
  own_.weight = left.weight;
  own_.nonzero = left.nonzero;
  for (size_t i = 0; i < gradients_.size(); ++i) {
    const auto found = left.gradients.find(gradients_[i].parameter.unsafeGetTensorImpl());
    if (found == left.gradients.end()) continue;
    own_.used[i] = found->second.used && gradients_[i].parameter.grad().defined();
    own_.means[i] = found->second.mean;
    if (belongs_in_bucket(i)) lay_in_bucket(i);
    if (found->second.has_mean) note_mean(i);
    if (own_.used[i]) {
      note_version(i);
      mark(i);
    }
    sums_.resume(i, found->second.sum, keeps_whole(buckets_.of(i)));
  }
}

}  // namespace shoal
