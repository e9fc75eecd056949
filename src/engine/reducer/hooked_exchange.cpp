#include "engine/reducer/hooked_exchange.h"

#include <fmt/format.h>
#include <torch/utils.h>

#include "memory/views.h"
#include "shoal/error.h"
#include "shoal/group.h"

namespace shoal {
namespace {

// What a hook makes of a sum may be inexact, so that facts stay out of it.
class HookedExchange : public Exchange {
 public:
  HookedExchange(std::unique_ptr<Exchange> inner, std::shared_ptr<CommunicationHook> hook,
                 std::vector<Gradient> gradients, std::string prefix)
      : inner_(std::move(inner)),
        point_(inner_->hook_point()),
        hook_(std::move(hook)),
        gradients_(std::move(gradients)),
        prefix_(std::move(prefix)) {}

  std::vector<std::vector<size_t>> plan(const std::vector<Gradient>& gradients,
                                        std::span<const size_t> order) const override {
    return inner_->plan(gradients, order);
  }
  bool follows_order() const override { return inner_->follows_order(); }
  FlatLayout layout(std::span<const int64_t> numels, size_t element_bytes) const override {
    return inner_->layout(numels, element_bytes);
  }
  CommunicationHook* hook() const override { return hook_.get(); }
  HookPoint hook_point() const override { return point_; }
  bool everywhere() const override { return inner_->everywhere(); }
  bool carries_facts() const override { return false; }
  int place(int rank) const override { return inner_->place(rank); }
  Range kept(const Bucket& bucket, int place) const override { return inner_->kept(bucket, place); }
  bool keeps_whole(const Bucket& bucket, int place) const override { return inner_->keeps_whole(bucket, place); }
  bool apart() const override { return inner_->apart(); }
  bool used_up() const override { return inner_->used_up(); }
  bool two_stages() const override { return inner_->two_stages(); }
  void step_abandoned() const override { hook_->reset(); }

  PendingExchange reduce(Bucket& bucket, const Label& label) const override {
    if (!point_.of_kept) return hook_->begin(seen(bucket, label));
    auto within = inner_->reduce(bucket, label);
    if (!bucket.kept_range().empty())
      within.further = [this, &bucket, label] { return hook_->begin(seen(bucket, label)); };
    return within;
  }

 private:
  // The bucket, or what is kept of it, as the hook sees it.
  GradientBucket seen(const Bucket& bucket, const Label& label) const {
    const auto range = point_.of_kept ? bucket.kept_range() : Range{0, bucket.payload_numel()};
    GradientBucket seen{.group = point_.group,
                        .sum_for = point_.sum_for,
                        .gradients = point_.of_kept ? bucket.kept() : bucket.payload(range),
                        .sum = {},
                        .pieces = {},
                        .last = bucket.last(),
                        .label = label};
    if (point_.sum_for == SumFor::owner) seen.owner = owner(bucket);
    if (point_.sum_for == SumFor::parts) {
      seen.sum = bucket.kept();
    } else if (point_.sum_for == SumFor::everybody || seen.owner == point_.group.rank()) {
      seen.sum = seen.gradients;
    }
    // Gaps hold what was there before; to a hook they are elements as any others.
    int64_t filled = range.begin;
    const auto clear_to = [&](int64_t end) {
      if (end > filled) seen.gradients.narrow(0, filled - range.begin, end - filled).zero_();
    };
    for (const auto& slice : bucket.layout().overlapping(range)) {
      clear_to(slice.in_flat.begin);
      filled = slice.in_flat.end;
      const auto& about = gradients_[bucket.members()[slice.piece]];
      const auto place = slice.in_flat.normalize(slice.in_flat.begin - range.begin);
      const bool whole = slice.in_piece.size() == about.parameter.numel();
      seen.pieces.push_back({.name = prefix_ + about.name,
                             .gradient = whole ? view_like(seen.gradients, place.begin, about.parameter)
                                               : seen.gradients.narrow(0, place.begin, place.size()),
                             .in_bucket = place,
                             .in_parameter = slice.in_piece});
    }
    clear_to(range.end);
    return seen;
  }

  int owner(const Bucket& bucket) const {
    int rank = 0;
    while (rank + 1 < point_.group.size() && inner_->kept(bucket, rank).empty()) ++rank;
    return rank;
  }

  std::unique_ptr<Exchange> inner_;
  HookPoint point_;
  std::shared_ptr<CommunicationHook> hook_;
  std::vector<Gradient> gradients_;
  std::string prefix_;
};

std::string who_gets_them(SumFor sum_for) {
  return sum_for == SumFor::owner ? "each gradient's sum goes to one rank" : "each rank gets a part of every sum";
}

}  // namespace

std::unique_ptr<Exchange> with_hook(std::unique_ptr<Exchange> exchange, std::shared_ptr<CommunicationHook> hook,
                                    const std::vector<Gradient>& gradients, const std::string& wrapper,
                                    const std::string& prefix) {
  if (!hook) return exchange;
  const auto point = exchange->hook_point();
  if (!hook->serves(point.sum_for)) {
    throw UsageError(
        fmt::format("{}: communication hook {} gives every rank the whole sum, but here {}; take another hook, or "
                    "DistributedDataParallel or FullyShardedDataParallel with no_shard",
                    wrapper, hook->name(), who_gets_them(point.sum_for)));
  }
  agree(point.group, "the communication hook", {hook->name()});
  return std::make_unique<HookedExchange>(std::move(exchange), std::move(hook), gradients, prefix);
}

}  // namespace shoal
