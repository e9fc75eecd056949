#include <torch/utils.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "engine/changes/changed_values.h"
#include "engine/changes/noticed_writes.h"
#include "engine/changes/operator_watch.h"
#include "engine/changes/parameter_watch.h"
#include "engine/changes/replaced_values.h"
#include "engine/sharded/parameter_gather.h"
#include "memory/views.h"

namespace shoal {
namespace {

class InGradients : public ParameterGather, private MemoryUser {
 public:
  InGradients(const Group& group, const std::vector<at::Tensor>& parameters, const Bucket& bucket)
      : group_(group), own_(bucket.layout().part(group.rank())), writes_(parameters.size()) {
    const torch::NoGradGuard no_grad;
    for (const auto& parameter : parameters) {
      const auto values = parameter.detach();
      homes_.push_back(watchable(values.is_non_overlapping_and_dense() ? values : values.contiguous()));
      parameter.set_data(homes_.back());
      watch(homes_.back().storage().unsafeGetStorageImpl(), *this, Watched::writes);
    }
    watch_ = ParameterWatch(parameters);
    const auto numel = bucket.layout().size();
    if (numel == 0) return;  // such a bucket has no memory
    values_ = bucket.payload({0, numel}).view(parameters.front().scalar_type()).narrow(0, 0, numel);
    for (size_t piece = 0; piece < parameters.size(); ++piece) {
      views_.push_back(view_like(values_, bucket.layout().range(piece).begin, parameters[piece]));
    }
  }
  ~InGradients() override {
    for (const auto& home : homes_) unwatch(home.storage().unsafeGetStorageImpl(), *this);
  }
  InGradients(const InGradients&) = delete;
  InGradients& operator=(const InGradients&) = delete;

  at::Tensor elements(const Slice& slice) const override {
    return in_memory_order(homes_[slice.piece]).narrow(0, slice.in_piece.begin, slice.in_piece.size());
  }
  at::Tensor outgoing(const Slice& slice) const override {
    return values_.narrow(0, slice.in_flat.begin, slice.in_flat.size());
  }
  void publish(const Label& label) override {
    if (values_.defined()) work_ = group_.all_gather(values_, values_.narrow(0, own_.begin, own_.size()), label);
  }
  // To the parameters' own memory; another that somebody has given them meanwhile has later values.
  void wait(const Label&) override {
    work_.wait();
    const torch::NoGradGuard no_grad;
    const UnwatchedOperators own;
    for (size_t piece = 0; piece < views_.size(); ++piece) at::Tensor(homes_[piece]).copy_(views_[piece]);
  }
  // Not the bucket's memory, on which transports run operators themselves.
  std::vector<at::Tensor> awaited() const override { return homes_; }

  std::vector<size_t> changed() const override {
    std::vector<size_t> list;
    if (!writes_.any() && !watch_.changed()) return list;
    const std::lock_guard lock(mutex_);
    for (size_t piece = 0; piece < homes_.size(); ++piece) {
      if (writes_.contains(piece) || replaced(piece)) list.push_back(piece);
    }
    return list;
  }
  void forget_undone() override {
    if (!writes_.any()) return;
    const UnwatchedOperators own;
    const std::lock_guard lock(mutex_);
    writes_.forget_undone(homes_, [&](size_t piece) { return !replaced(piece); });
  }
  bool replaced(size_t piece) const override { return !same_view(watch_.parameters()[piece], homes_[piece]); }
  uint64_t digest(size_t piece) const override { return digest_of(watch_.parameters()[piece]); }
  at::Tensor current(const Slice& slice) const override {
    return copied_elements(homes_[slice.piece], watch_.parameters()[slice.piece], slice.in_piece);
  }
  // Every rank has all of them already.
  void adopt(const Label&) override {
    const torch::NoGradGuard no_grad;
    const UnwatchedOperators own;
    for (const auto piece : changed()) {
      const auto& parameter = watch_.parameters()[piece];
      if (!same_view(parameter, homes_[piece])) {
        move_home(piece, copy_like(homes_[piece], parameter).to(homes_[piece].scalar_type()));
        parameter.set_data(homes_[piece]);
      }
      watch_.note(piece);
    }
    const std::lock_guard lock(mutex_);
    writes_.forget_all();
  }
  void notice_writes(bool on) override { writes_.notice(on); }

 private:
  // The program may hold the former one.
  void move_home(size_t piece, const at::Tensor& values) {
    const auto former = std::exchange(homes_[piece], watchable(values));
    watch(homes_[piece].storage().unsafeGetStorageImpl(), *this, Watched::writes);
    const auto is_there = [&](const at::Tensor& home) { return same_storage(home, former); };
    if (std::none_of(homes_.begin(), homes_.end(), is_there)) unwatch(former.storage().unsafeGetStorageImpl(), *this);
  }
  void before_write(std::string_view, c10::StorageImpl* storage) override {
    if (!writes_.notices()) return;
    const UnwatchedOperators own;
    const std::lock_guard lock(mutex_);
    for (size_t piece = 0; piece < homes_.size(); ++piece) {
      if (homes_[piece].storage().unsafeGetStorageImpl() == storage) writes_.note(piece, homes_[piece]);
    }
  }

  Group group_;
  Range own_;
  std::vector<at::Tensor> homes_;  // the parameters' own memory
  ParameterWatch watch_;
  mutable std::mutex mutex_;  // writes_
  NoticedWrites writes_;
  at::Tensor values_;              // of all parameters, [elements of the layout]
  std::vector<at::Tensor> views_;  // of each one
  Work work_;
};

}  // namespace

std::unique_ptr<ParameterGather> gather_in_gradients(const Group& group, std::vector<at::Tensor> parameters,
                                                     const Bucket& bucket) {
  return std::make_unique<InGradients>(group, parameters, bucket);
}

}  // namespace shoal
