#include "strategy/zero/second_gradients.h"

#include <torch/utils.h>

#include <utility>

#include "engine/sharded/second_copies.h"
#include "memory/views.h"

namespace shoal {
namespace {

constexpr int tag_of_gradients = 0x5ec1;  // no other messages of the group have it

}  // namespace

SecondGradients::SecondGradients(std::shared_ptr<Reducer> reducer)
    : reducer_(std::move(reducer)), copies_(std::make_shared<SecondCopies>(*reducer_)) {
  for (const auto& gradient : reducer_->gradients()) reduced_.insert(gradient.parameter.unsafeGetTensorImpl());
  const std::weak_ptr<SecondCopies> weak = copies_;
  reducer_->callbacks.after_sum = [weak](PendingExchange sum, size_t bucket, const Label& label) {
    const auto copies = weak.lock();
    return copies ? copies->follow(std::move(sum), bucket, label) : std::move(sum);
  };
}

// In the parameter's dtype and the bucket's strides, as the owner's optimizer gets it.
void SecondGradients::take_copies() {
  if (std::exchange(taken_at_, reducer_->step()) == reducer_->step()) return;
  gradients_.clear();
  if (!copies_->of_these_buckets()) return;  // the owners find other digests, and send their gradients
  const auto& buckets = reducer_->buckets();
  for (size_t number = 0; number < buckets.size(); ++number) {
    for (const auto& copy : copies_->of(number)) {
      for (const auto& slice : buckets[number].layout().overlapping(copy.range)) {
        const auto i = buckets[number].members()[slice.piece];
        const auto& parameter = reducer_->gradients()[i].parameter;
        const auto remains = reducer_->sums().remains(i);
        if (remains == EarlierSums::Remains::nothing) continue;
        auto gradient = view_like(copy.sum, slice.in_flat.begin - copy.range.begin, buckets[number].like(slice.piece));
        if (remains == EarlierSums::Remains::zeros) gradient.zero_();
        gradients_[parameter.unsafeGetTensorImpl()] = gradient.to(parameter.scalar_type());
      }
    }
  }
}

at::Tensor SecondGradients::of(const at::Tensor& parameter) {
  take_copies();
  const auto found = gradients_.find(parameter.unsafeGetTensorImpl());
  return found == gradients_.end() ? at::Tensor() : found->second;
}

void SecondGradients::send_again(const std::vector<at::Tensor>& parameters, const std::vector<int>& owners,
                                 const std::vector<int>& second) {
  const auto& group = reducer_->group();
  const Label label{reducer_->step(), -1, "gradients for second owners"};
  auto there = at::zeros({static_cast<int64_t>(parameters.size())}, at::kInt);
  for (size_t i = 0; i < parameters.size(); ++i) {
    const bool gives = owners[i] == group.rank() && parameters[i].grad().defined();
    if (gives && parameters[i].numel() > 0) there[static_cast<int64_t>(i)] = 1;
  }
  group.all_reduce(there, ReduceOp::max, label).wait();
  taken_at_ = reducer_->step();
  gradients_.clear();
  std::vector<Work> works;
  std::vector<at::Tensor> sent;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto to = second[static_cast<size_t>(owners[i])];
    const bool gives = owners[i] == group.rank(), takes = to == group.rank();
    if (there.data_ptr<int>()[i] == 0 || (!gives && !takes)) continue;
    const auto& parameter = parameters[i];
    auto gradient =
        at::empty_strided(parameter.sizes(), dense_strides(parameter), parameter.options().requires_grad(false));
    if (gives) {
      sent.push_back(in_memory_order(gradient.copy_(parameter.grad())));
      works.push_back(group.send(sent.back(), to, tag_of_gradients, label));
    } else {
      works.push_back(group.recv(in_memory_order(gradient), owners[i], tag_of_gradients, label));
      gradients_[parameter.unsafeGetTensorImpl()] = gradient;
    }
  }
  for (auto& work : works) work.wait();
}

std::vector<EarlierSums::Remains> SecondGradients::remains() const {
  std::vector<EarlierSums::Remains> list;
  for (size_t i = 0; i < reducer_->gradients().size(); ++i) list.push_back(reducer_->sums().remains(i));
  return list;
}

}  // namespace shoal
