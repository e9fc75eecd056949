#include "engine/reducer/hooked_reduction.h"

#include <fmt/format.h>
#include <torch/utils.h>

#include "memory/views.h"
#include "shoal/error.h"

namespace shoal {
namespace {

// The trailer stays out of the hook, because hooks may be lossy.
class HookedReduction : public GradientReduction {
 public:
  HookedReduction(std::unique_ptr<GradientReduction> inner, std::shared_ptr<CommunicationHook> hook,
                  std::vector<Gradient> gradients, std::string prefix)
      : GradientReduction(without_trailer(inner->plan()), std::move(hook)),
        inner_(std::move(inner)),
        gradients_(std::move(gradients)),
        prefix_(std::move(prefix)) {}

  PendingExchange reduce(Bucket& bucket, const Label& label) const override {
    if (bucket.payload_numel() == 0) return {};
    if (!plan().hook_point.of_kept) return hook()->begin(seen(bucket, label));
    auto within = inner_->reduce(bucket, label);
    if (!bucket.kept_range().empty())
      within.next_stage = [this, &bucket, label] { return hook()->begin(seen(bucket, label)); };
    return within;
  }

 private:
  static ReductionPlan without_trailer(ReductionPlan plan) {
    plan.trailer_rides = false;
    return plan;
  }

  // The bucket, or the kept part of it, in the form that hooks take.
  GradientBucket seen(const Bucket& bucket, const Label& label) const {
    const auto& point = plan().hook_point;
    const auto range = point.of_kept ? bucket.kept_range() : Range{0, bucket.payload_numel()};
    GradientBucket seen{.group = point.group,
                        .result = point.result,
                        .gradients = point.of_kept ? bucket.kept() : bucket.payload(range),
                        .sum = {},
                        .pieces = {},
                        .last = bucket.last(),
                        .label = label};
    if (point.result == SumResult::owner) seen.owner = plan().owners[bucket.members().front()];
    if (point.result == SumResult::ranges) {
      seen.sum = bucket.kept();
    } else if (point.result == SumResult::all_ranks || seen.owner == point.group.rank()) {
      seen.sum = seen.gradients;
    }
    // Gaps hold stale values, but to a hook they are elements like any other.
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
                             .gradient = whole ? view_like(seen.gradients, place.begin, bucket.like(slice.piece))
                                               : seen.gradients.narrow(0, place.begin, place.size()),
                             .in_bucket = place,
                             .in_parameter = slice.in_piece});
    }
    clear_to(range.end);
    return seen;
  }

  std::unique_ptr<GradientReduction> inner_;
  std::vector<Gradient> gradients_;
  std::string prefix_;
};

std::string who_gets_them(SumResult result) {
  return result == SumResult::owner ? "each gradient's sum goes to one rank" : "each rank gets a part of every sum";
}

}  // namespace

std::unique_ptr<GradientReduction> with_hook(std::unique_ptr<GradientReduction> reduction,
                                             std::shared_ptr<CommunicationHook> hook,
                                             const std::vector<Gradient>& gradients, const std::string& wrapper,
                                             const std::string& prefix) {
  if (!hook) return reduction;
  const auto point = reduction->plan().hook_point;
  if (!hook->serves(point.result)) {
    throw UsageError(
        fmt::format("{}: communication hook {} gives every rank the whole sum, but here {}; take another hook, or "
                    "DistributedDataParallel or FullyShardedDataParallel with no_shard",
                    wrapper, hook->name(), who_gets_them(point.result)));
  }
  return std::make_unique<HookedReduction>(std::move(reduction), std::move(hook), gradients, prefix);
}

}  // namespace shoal
