#include "engine/sharded/parameter_gather.h"

#include <torch/utils.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>
#include <utility>

#include "engine/paging/operator_watch.h"
#include "engine/sharded/changed_values.h"
#include "engine/sharded/parameter_buffer.h"
#include "engine/wrapper/parameter_watch.h"
#include "memory/views.h"

namespace shoal {
namespace {

// A tensor like `home` with the parameter's values, in the parameter's dtype.
at::Tensor copy_like(const at::Tensor& home, const at::Tensor& parameter) {
  return at::empty_strided(home.sizes(), home.strides(), parameter.options().requires_grad(false)).copy_(parameter);
}

at::Tensor copied_elements(const at::Tensor& home, const at::Tensor& parameter, const Range& elements) {
  return in_memory_order(copy_like(home, parameter)).narrow(0, elements.begin, elements.size());
}

class InParameters : public ParameterGather {
 public:
  InParameters(const Group& group, std::vector<at::Tensor> parameters, const FlatLayout& layout,
               std::vector<Range> owners, const Label& label)
      : buffer_(group, std::move(parameters), layout, std::move(owners), HostSharedBufferOptions(), label) {}

  at::Tensor elements(const Slice& slice) const override { return buffer_.part(slice.in_flat); }
  at::Tensor outgoing(const Slice& slice) const override { return elements(slice); }
  void publish(const Label& label) override { buffer_.publish(label); }
  void wait(const Label& label) override { buffer_.wait(label); }
  std::vector<at::Tensor> awaited() const override { return buffer_.homes(); }
  std::vector<size_t> changed() const override { return buffer_.changed(); }
  void forget_undone() override { buffer_.forget_undone(); }
  bool replaced(size_t piece) const override { return !same_view(buffer_.parameters()[piece], buffer_.homes()[piece]); }
  uint64_t digest(size_t piece) const override { return digest_of(buffer_.parameters()[piece]); }
  at::Tensor current(const Slice& slice) const override { return buffer_.current(slice.piece, slice.in_piece); }
  void leave_to_holders() override { buffer_.leave_to_holders(); }
  void adopt(const Label& label) override { buffer_.adopt(label); }
  void adopt_alone() override { buffer_.adopt_alone(); }
  void notice_writes(bool on) override { buffer_.notice_writes(on); }
  void make_private() override { buffer_.make_private(); }
  void end_private(bool keep) override { buffer_.end_private(keep); }
  void leave_moved() override { buffer_.leave_moved(); }
  bool shared() const override { return buffer_.shared(); }

 private:
  ParameterBuffer buffer_;
};

class InGradients : public ParameterGather, private MemoryUser {
 public:
  InGradients(const Group& group, const std::vector<at::Tensor>& parameters, const Bucket& bucket)
      : group_(group), own_(bucket.layout().part(group.rank())), written_(parameters.size()) {
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
    if (!any_written_ && !watch_.changed()) return list;
    const std::lock_guard lock(mutex_);
    for (size_t piece = 0; piece < homes_.size(); ++piece) {
      if (written_[piece] || replaced(piece)) list.push_back(piece);
    }
    return list;
  }
  void forget_undone() override {
    if (!any_written_) return;
    const UnwatchedOperators own;
    const std::lock_guard lock(mutex_);
    bool any = false;
    for (size_t piece = 0; piece < homes_.size(); ++piece) {
      if (!written_[piece]) continue;
      if (!replaced(piece) && digest_of(homes_[piece]) == *written_[piece]) written_[piece].reset();
      any = any || written_[piece];
    }
    any_written_ = any;
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
    written_.assign(written_.size(), std::nullopt);
    any_written_ = false;
  }
  void notice_writes(bool on) override { notices_ = on; }

 private:
  // The program may hold the former one.
  void move_home(size_t piece, const at::Tensor& values) {
    const auto former = std::exchange(homes_[piece], watchable(values));
    watch(homes_[piece].storage().unsafeGetStorageImpl(), *this, Watched::writes);
    const auto is_there = [&](const at::Tensor& home) { return same_storage(home, former); };
    if (std::none_of(homes_.begin(), homes_.end(), is_there)) unwatch(former.storage().unsafeGetStorageImpl(), *this);
  }
  void before_write(std::string_view, c10::StorageImpl* storage) override {
    if (!notices_) return;
    const UnwatchedOperators own;
    const std::lock_guard lock(mutex_);
    any_written_ = true;
    for (size_t piece = 0; piece < homes_.size(); ++piece) {
      if (written_[piece] || homes_[piece].storage().unsafeGetStorageImpl() != storage) continue;
      written_[piece] = digest_of(homes_[piece]);
    }
  }

  Group group_;
  Range own_;
  std::vector<at::Tensor> homes_;  // the parameters' own memory
  ParameterWatch watch_;
  std::atomic<bool> notices_ = true;
  std::atomic<bool> any_written_ = false;
  mutable std::mutex mutex_;                      // written_
  std::vector<std::optional<uint64_t>> written_;  // digests of the values before the first write
  at::Tensor values_;                             // of all parameters, [elements of the layout]
  std::vector<at::Tensor> views_;                 // of each one
  Work work_;
};

class InPages : public ParameterGather {
 public:
  InPages(std::shared_ptr<Pager> pager, std::vector<at::Tensor> parameters, const FlatLayout& layout,
          const std::vector<Range>& owners, int rank, const std::string& name, bool filled)
      : pager_(std::move(pager)), parameters_(std::move(parameters)), own_range_(owners[rank]) {
    const torch::NoGradGuard no_grad;
    const auto options = parameters_.front().options().requires_grad(false);
    const Range all{0, layout.size()};
    const auto root = std::find(owners.begin(), owners.end(), all);
    const bool cut = root == owners.end() || owners.size() == 1;
    PageSource source{.name = name, .own = {}, .root = cut ? -1 : static_cast<int>(root - owners.begin())};
    if (cut || own_range_ == all) {
      own_ = at::zeros({own_range_.size()}, options);
      for (const auto& slice : layout.overlapping(own_range_)) {
        if (!filled) break;
        elements(slice).copy_(
            in_memory_order(parameters_[slice.piece]).narrow(0, slice.in_piece.begin, slice.in_piece.size()));
      }
      source.own = own_;
    }
    source.written = [this](const at::Tensor& memory) { note_written(memory); };
    source.stored = [this](const at::Tensor& memory) {
      for (const auto& held : held_) at::Tensor(held.values).copy_(part_of(memory, held.range));
    };
    page_ = pager_->add(layout.size(), options, std::move(source));
    for (size_t piece = 0; piece < parameters_.size(); ++piece) {
      const auto& parameter = parameters_[piece];
      ranges_.push_back(layout.range(piece));
      homes_.push_back(page_.as_strided(parameter.sizes(), dense_strides(parameter), ranges_[piece].begin));
      parameter.set_data(homes_[piece]);
    }
    watch_ = ParameterWatch(parameters_);
  }
  ~InPages() override { pager_->forget_writer(page_); }
  InPages(const InPages&) = delete;
  InPages& operator=(const InPages&) = delete;

  at::Tensor elements(const Slice& slice) const override {
    for (const auto& held : held_) {
      if (held.range.contains(slice.in_flat.begin)) return part_of(held.values, slice.in_flat, held.range.begin);
    }
    return part_of(own_, slice.in_flat, own_range_.begin);
  }
  at::Tensor outgoing(const Slice& slice) const override { return elements(slice); }
  void hold(std::vector<Range> ranges) override {
    held_.clear();
    for (const auto& range : ranges) {
      held_.push_back({range, at::zeros({range.size()}, page_.options().requires_grad(false))});
    }
  }
  void publish(const Label&) override { pager_->invalidate(page_); }
  void wait(const Label&) override {}
  std::vector<at::Tensor> awaited() const override { return {}; }
  Pager* pager() const override { return pager_.get(); }

  // A write is noticed of a page as a whole.
  std::vector<size_t> changed() const override {
    std::vector<size_t> list;
    const bool written = pager_->written(page_);
    if (!written && !watch_.changed()) return list;
    for (size_t piece = 0; piece < parameters_.size(); ++piece) {
      if (written || replaced(piece)) list.push_back(piece);
    }
    return list;
  }
  bool replaced(size_t piece) const override { return !same_view(parameters_[piece], homes_[piece]); }
  uint64_t digest(size_t piece) const override {
    if (replaced(piece)) return digest_of(parameters_[piece]);
    pager_->store_writes(page_);
    return digests_[piece];
  }
  at::Tensor current(const Slice& slice) const override {
    if (replaced(slice.piece)) {
      return copied_elements(homes_[slice.piece], parameters_[slice.piece], slice.in_piece);
    }
    pager_->store_writes(page_);
    return elements(slice);
  }
  // What was written in place is in the ranks' parts already.
  void adopt(const Label& label) override {
    const torch::NoGradGuard no_grad;
    pager_->store_writes(page_);
    if (held_on_any_rank(label)) move_homes();
    take_replaced();
  }
  void adopt_alone() override {
    const torch::NoGradGuard no_grad;
    pager_->store_writes(page_);
    take_replaced();
  }
  void notice_writes(bool on) override { pager_->notice_writes(on); }

 private:
  // What other ranks own, in the parameters' dtype.
  struct Held {
    Range range;
    at::Tensor values;
  };

  static at::Tensor part_of(const at::Tensor& memory, const Range& range, int64_t begin = 0) {
    return memory.narrow(0, range.begin - begin, range.size());
  }
  // The current values of a parameter to `memory`, which has the elements of `range`.
  void take(size_t piece, const at::Tensor& memory, const Range& range) const {
    const auto common = ranges_[piece].intersect(range);
    if (common.empty()) return;
    const auto begin = ranges_[piece].begin;
    part_of(memory, common, range.begin)
        .copy_(copied_elements(homes_[piece], parameters_[piece], {common.begin - begin, common.end - begin}));
  }
  void take_replaced() {
    for (size_t piece = 0; piece < parameters_.size(); ++piece) {
      if (!replaced(piece)) continue;
      if (own_.defined()) take(piece, own_, own_range_);
      for (const auto& held : held_) take(piece, held.values, held.range);
      parameters_[piece].set_data(homes_[piece]);
    }
    watch_.note();
    digests_.clear();
    pager_->forget_writes(page_);
    pager_->invalidate(page_);
  }
  // Whether the program holds the former memory of a replaced parameter (own = p.data(), to be put back).
  bool held_on_any_rank(const Label& label) const {
    size_t replaced_ones = 0;
    for (size_t piece = 0; piece < parameters_.size(); ++piece) replaced_ones += replaced(piece) ? 1 : 0;
    const auto own_uses = Pager::uses_of_a_page + 1 + homes_.size() + parameters_.size() - replaced_ones;
    const bool holds = replaced_ones > 0 && page_.storage().use_count() > own_uses;
    auto held = at::full({1}, holds ? 1 : 0, at::kInt);
    pager_->group().all_reduce(held, ReduceOp::max, label).wait();
    return held.item<int>() != 0;
  }
  // To another page; the former one is an ordinary tensor from now on.
  void move_homes() {
    page_ = pager_->leave_to_holders(page_);
    for (size_t piece = 0; piece < parameters_.size(); ++piece) {
      const bool follows = !replaced(piece);
      homes_[piece] = page_.as_strided(homes_[piece].sizes(), homes_[piece].strides(), ranges_[piece].begin);
      if (follows) parameters_[piece].set_data(homes_[piece]);
    }
  }
  void note_written(const at::Tensor& memory) {
    digests_.clear();
    for (size_t piece = 0; piece < parameters_.size(); ++piece) {
      digests_.push_back(digest_of(memory.narrow(0, ranges_[piece].begin, ranges_[piece].size())));
    }
  }

  std::shared_ptr<Pager> pager_;
  std::vector<at::Tensor> parameters_;
  Range own_range_;
  at::Tensor own_;  // this rank's elements, in the parameters' dtype
  std::vector<Held> held_;
  at::Tensor page_;  // all elements
  std::vector<Range> ranges_;
  std::vector<at::Tensor> homes_;  // on the page
  ParameterWatch watch_;
  std::vector<uint64_t> digests_;  // of what this rank has written, by piece
};

}  // namespace

std::unique_ptr<ParameterGather> gather_in_parameters(const Group& group, std::vector<at::Tensor> parameters,
                                                      const FlatLayout& layout, std::vector<Range> owners,
                                                      const Label& label) {
  return std::make_unique<InParameters>(group, std::move(parameters), layout, std::move(owners), label);
}

std::unique_ptr<ParameterGather> gather_in_gradients(const Group& group, std::vector<at::Tensor> parameters,
                                                     const Bucket& bucket) {
  return std::make_unique<InGradients>(group, parameters, bucket);
}

std::unique_ptr<ParameterGather> gather_in_pages(std::shared_ptr<Pager> pager, std::vector<at::Tensor> parameters,
                                                 const FlatLayout& layout, const std::vector<Range>& owners, int rank,
                                                 const std::string& name, bool filled) {
  return std::make_unique<InPages>(std::move(pager), std::move(parameters), layout, owners, rank, name, filled);
}

}  // namespace shoal
