#include "engine/parameter_gather.h"

#include <torch/utils.h>

#include <algorithm>

#include "engine/operator_watch.h"
#include "engine/parameter_buffer.h"
#include "memory/views.h"

namespace shoal {
namespace {

class InParameters : public ParameterGather {
 public:
  InParameters(const Group& group, std::vector<at::Tensor> parameters, const FlatLayout& layout,
               std::vector<Range> owners, const Label& label)
      : buffer_(group, std::move(parameters), layout, std::move(owners), OnceBufferOptions(), label) {
    const torch::NoGradGuard no_grad;
    for (at::Tensor parameter : buffer_.parameters()) parameter.set_data(watchable(parameter.detach()));
  }

  at::Tensor elements(const Slice& slice) const override { return buffer_.part(slice.in_flat); }
  at::Tensor outgoing(const Slice& slice) const override { return elements(slice); }
  void publish(const Label& label) override { buffer_.publish(label); }
  void wait(const Label& label) override { buffer_.wait(label); }
  std::vector<at::Tensor> awaited() const override { return {buffer_.part({0, buffer_.layout().size()})}; }

 private:
  ParameterBuffer buffer_;
};

class InGradients : public ParameterGather {
 public:
  InGradients(const Group& group, std::vector<at::Tensor> parameters, const Bucket& bucket)
      : group_(group), parameters_(std::move(parameters)), own_(bucket.layout().part(group.rank())) {
    const torch::NoGradGuard no_grad;
    for (const auto& parameter : parameters_) {
      const auto values = parameter.detach();
      parameter.set_data(watchable(values.is_non_overlapping_and_dense() ? values : values.contiguous()));
    }
    const auto numel = bucket.layout().size();
    if (numel == 0) return;  // such a bucket has no memory
    values_ = bucket.payload({0, numel}).view(parameters_.front().scalar_type()).narrow(0, 0, numel);
    for (size_t piece = 0; piece < parameters_.size(); ++piece) {
      views_.push_back(view_like(values_, bucket.layout().range(piece).begin, parameters_[piece]));
    }
  }

  at::Tensor elements(const Slice& slice) const override {
    const auto& parameter = parameters_[slice.piece];
    return parameter.detach()
        .as_strided({parameter.numel()}, {1})
        .narrow(0, slice.in_piece.begin, slice.in_piece.size());
  }
  at::Tensor outgoing(const Slice& slice) const override {
    return values_.narrow(0, slice.in_flat.begin, slice.in_flat.size());
  }
  void publish(const Label& label) override {
    if (values_.defined()) work_ = group_.all_gather(values_, values_.narrow(0, own_.begin, own_.size()), label);
  }
  void wait(const Label&) override {
    work_.wait();
    const torch::NoGradGuard no_grad;
    for (size_t piece = 0; piece < views_.size(); ++piece) parameters_[piece].copy_(views_[piece]);
  }
  // Not the bucket's memory, on which transports run operators themselves.
  std::vector<at::Tensor> awaited() const override { return parameters_; }

 private:
  Group group_;
  std::vector<at::Tensor> parameters_;
  Range own_;
  at::Tensor values_;              // of all parameters, [elements of the layout]
  std::vector<at::Tensor> views_;  // of each one
  Work work_;
};

class InPages : public ParameterGather {
 public:
  InPages(std::shared_ptr<Pager> pager, std::vector<at::Tensor> parameters, const FlatLayout& layout,
          const std::vector<Range>& owners, int rank, const std::string& name)
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
        elements(slice).copy_(
            in_memory_order(parameters_[slice.piece]).narrow(0, slice.in_piece.begin, slice.in_piece.size()));
      }
      source.own = own_;
    }
    page_ = pager_->add(layout.size(), options, std::move(source));
    for (size_t piece = 0; piece < parameters_.size(); ++piece) {
      auto& parameter = parameters_[piece];
      parameter.set_data(page_.as_strided(parameter.sizes(), dense_strides(parameter), layout.range(piece).begin));
    }
  }

  at::Tensor elements(const Slice& slice) const override {
    return own_.narrow(0, slice.in_flat.begin - own_range_.begin, slice.in_flat.size());
  }
  at::Tensor outgoing(const Slice& slice) const override { return elements(slice); }
  void publish(const Label&) override { pager_->invalidate(page_); }
  void wait(const Label&) override {}
  std::vector<at::Tensor> awaited() const override { return {}; }

 private:
  std::shared_ptr<Pager> pager_;
  std::vector<at::Tensor> parameters_;
  Range own_range_;
  at::Tensor own_;   // this rank's elements, in the parameters' dtype
  at::Tensor page_;  // all elements
};

}  // namespace

std::unique_ptr<ParameterGather> gather_in_parameters(const Group& group, std::vector<at::Tensor> parameters,
                                                      const FlatLayout& layout, std::vector<Range> owners,
                                                      const Label& label) {
  return std::make_unique<InParameters>(group, std::move(parameters), layout, std::move(owners), label);
}

std::unique_ptr<ParameterGather> gather_in_gradients(const Group& group, std::vector<at::Tensor> parameters,
                                                     const Bucket& bucket) {
  return std::make_unique<InGradients>(group, std::move(parameters), bucket);
}

std::unique_ptr<ParameterGather> gather_in_pages(std::shared_ptr<Pager> pager, std::vector<at::Tensor> parameters,
                                                 const FlatLayout& layout, const std::vector<Range>& owners, int rank,
                                                 const std::string& name) {
  return std::make_unique<InPages>(std::move(pager), std::move(parameters), layout, owners, rank, name);
}

}  // namespace shoal
