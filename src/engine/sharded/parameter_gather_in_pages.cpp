#include <torch/utils.h>

#include <algorithm>
#include <utility>

#include "engine/changes/changed_values.h"
#include "engine/changes/parameter_watch.h"
#include "engine/changes/replaced_values.h"
#include "engine/sharded/parameter_gather.h"
#include "memory/views.h"

namespace shoal {
namespace {

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

std::unique_ptr<ParameterGather> gather_in_pages(std::shared_ptr<Pager> pager, std::vector<at::Tensor> parameters,
                                                 const FlatLayout& layout, const std::vector<Range>& owners, int rank,
                                                 const std::string& name, bool filled) {
  return std::make_unique<InPages>(std::move(pager), std::move(parameters), layout, owners, rank, name, filled);
}

}  // namespace shoal
