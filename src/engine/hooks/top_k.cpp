#include "shoal/hooks.h"

#include <fmt/format.h>
#include <torch/utils.h>

#include <cmath>
#include <limits>

#include "engine/hooks/residuals.h"
#include "engine/hooks/selection.h"
#include "shoal/error.h"

namespace shoal {
namespace {

// Adds the selected elements within `range` of a bucket to `sum`, which holds that range.
void add_to(const at::Tensor& sum, const Range& range, const Selection& selection) {
  const auto inside = at::logical_and(selection.positions >= range.begin, selection.positions < range.end);
  const auto positions = selection.positions.masked_select(inside).to(at::kLong) - range.begin;
  at::Tensor(sum).index_add_(0, positions, selection.values.masked_select(inside).to(sum.scalar_type()));
}

}  // namespace

void TopKOptions::validate() const {
  if (fraction > 0 && fraction <= 1) return;
  throw UsageError(fmt::format("TopKHook: fraction {}: give more than 0 and at most 1", fraction));
}

struct TopKHook::Memory {
  explicit Memory(bool error_feedback) : residuals(error_feedback) {}
  Residuals residuals;
};

TopKHook::TopKHook(const TopKOptions& options)
    : options_(options), memory_(std::make_unique<Memory>(options.error_feedback)) {
  options_.validate();
}

TopKHook::~TopKHook() = default;

std::string TopKHook::name() const {
  return fmt::format("topk, fraction {}, error feedback {}", options_.fraction, options_.error_feedback);
}

std::vector<const CommunicationHook*> TopKHook::with_memory() const {
  if (!options_.error_feedback) return {};
  return {this};
}

PendingExchange TopKHook::begin(const GradientBucket& bucket) {
  const auto numel = bucket.gradients.numel();
  if (numel > std::numeric_limits<int32_t>::max()) {
    throw UsageError(fmt::format(
        "communication hook topk: a bucket of {} elements is too large; make buckets or units smaller", numel));
  }
  const auto dtype = bucket.gradients.scalar_type();
  const auto wanted = memory_->residuals.add_to(bucket);
  std::vector<at::Tensor> chosen;
  for (const auto& piece : bucket.pieces) {
    const auto elements = wanted.narrow(0, piece.in_bucket.begin, piece.in_bucket.size());
    const auto count = static_cast<int64_t>(std::ceil(options_.fraction * static_cast<double>(elements.numel())));
    chosen.push_back(std::get<1>(at::topk(elements.abs(), count, 0, true, /*sorted=*/false)) + piece.in_bucket.begin);
  }
  const auto positions = chosen.empty() ? at::empty({0}, wanted.options().dtype(at::kLong)) : at::cat(chosen);
  const Selection own{wanted.index_select(0, positions).to(dtype), positions.to(at::kInt)};
  if (memory_->residuals.on()) {
    memory_->residuals.keep_all(bucket, wanted.index_add(0, positions, own.values.to(wanted.scalar_type()), -1));
  }
  const auto packed = own.packed();
  const auto& group = bucket.group;
  at::Tensor all;
  PendingExchange pending;
  if (bucket.result == SumResult::owner) {
    std::vector<at::Tensor> received;
    if (bucket.owner == group.rank()) {
      all = at::empty({group.size(), packed.numel()}, packed.options());
      received = all.unbind(0);
    }
    pending.work = group.gather(std::move(received), packed, bucket.owner, bucket.label);
  } else {
    all = at::empty({group.size(), packed.numel()}, packed.options());
    pending.work = group.all_gather(all.view({-1}), packed, bucket.label);
  }
  if (!bucket.sum.defined()) return pending;
  const auto begin = bucket.result == SumResult::ranges ? bucket.sum.numel() * group.rank() : 0;
  pending.finish = [all, to = bucket.sum, range = Range{begin, begin + bucket.sum.numel()}, count = positions.numel(),
                    dtype] {
    const auto sum = at::zeros({to.numel()}, to.options().dtype(wide(dtype)));
    for (int64_t rank = 0; count > 0 && rank < all.size(0); ++rank) {
      add_to(sum, range, Selection::unpack(all[rank], count, dtype));
    }
    at::Tensor(to).copy_(sum);
  };
  return pending;
}

void TopKHook::reset() {
  memory_->residuals.clear();
}

CommunicationHook::State TopKHook::state() const {
  State state;
  memory_->residuals.save(state);
  return state;
}

void TopKHook::load_state(const State& state) {
  for (const auto& [entry, value] : state) {
    if (memory_->residuals.load(entry, value)) continue;
    throw UsageError(fmt::format("communication hook {}: '{}' is not part of its state", name(), entry));
  }
}

}  // namespace shoal
