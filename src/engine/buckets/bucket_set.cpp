#include "engine/buckets/bucket_set.h"

#include <torch/utils.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <string>

#include "engine/buckets/common_sizes.h"
#include "engine/buckets/reduction_plan.h"
#include "memory/views.h"

namespace shoal {

BucketSet::BucketSet(const std::vector<Gradient>& gradients, const Group& group, const ReductionPlan& plan)
    : gradients_(gradients), group_(group), plan_(plan), frozen_(gradients.size()) {}

std::vector<Bucket> BucketSet::build(const std::vector<size_t>& order) {
  ++builds_;
  const auto planned = plan_.buckets(gradients_, order);
  auto old = std::exchange(buckets_, {});
  std::erase_if(old, [this](const Bucket& bucket) {
    return std::none_of(gradients_.begin(), gradients_.end(), [&](const Gradient& gradient) {
      return same_storage(gradient.parameter.grad(), bucket.flat());
    });
  });
  places_.assign(gradients_.size(), {});
  const bool apart = plan_.trailer_apart(gradients_);
  for (const auto& members : planned) {
    for (size_t index = 0; index < members.size(); ++index) places_[members[index]] = {buckets_.size(), index};
    buckets_.emplace_back(gradients_, members, group_, plan_, !apart);
  }
  mark_last();
  if (builds_ == 1) first_bytes_ = bytes();
  // Allocating and freeing shared memory takes about as long as a small model's whole step.
  constexpr int64_t small_bytes = 8 << 20;
  int64_t transient_bytes = 0;
  for (const auto& bucket : buckets_) transient_bytes += bucket.transient() ? bucket.layout().bytes() : 0;
  keeps_transient_ = transient_bytes <= small_bytes;
  const bool on_cpu = buckets_.empty() || buckets_.front().options().device().is_cpu();
  const bool alike = !keeps_transient_ && group_.transport() == "host" && on_cpu;
  spare_ = alike ? SpareMemory(most_times_larger, /*keeps_larger=*/true) : SpareMemory();
  if (alike) make_memory_alike();
  if (apart) {
    std::vector<size_t> all(gradients_.size());
    std::iota(all.begin(), all.end(), 0);
    const auto dtype = ReductionPlan::trailer_dtype(gradients_);
    trailer_ = StepTrailer(all, group_.allocate(StepTrailer::numel(all.size()), dtype));
  }
  return old;
}

std::vector<at::Tensor> BucketSet::parameters_of(const Bucket& bucket) const {
  std::vector<at::Tensor> list;
  for (const auto member : bucket.members()) list.push_back(gradients_[member].parameter);
  return list;
}

std::vector<Range> BucketSet::owners_of(const Bucket& bucket, int ranks) const {
  std::vector<Range> owners;
  for (int rank = 0; rank < ranks; ++rank) owners.push_back(plan_.kept(bucket, rank));
  return owners;
}

std::vector<std::vector<std::string>> BucketSet::names() const {
  std::vector<std::vector<std::string>> names;
  for (const auto& bucket : buckets_) {
    auto& list = names.emplace_back();
    for (const auto member : bucket.members()) list.push_back(gradients_[member].name);
  }
  return names;
}

std::vector<int64_t> BucketSet::bytes() const {
  std::vector<int64_t> list;
  for (const auto& bucket : buckets_) list.push_back(bucket.sparse() ? 0 : bucket.layout().bytes());
  return list;
}

// Gives transient buckets memory of one size, so that each of them can use what another has left. The part that a
// bucket does not use has no pages.
void BucketSet::make_memory_alike() {
  std::map<std::pair<at::ScalarType, std::string>, std::vector<Bucket*>> alike;
  for (auto& bucket : buckets_) {
    if (!bucket.transient() || bucket.sparse()) continue;
    alike[{bucket.options().dtype().toScalarType(), bucket.options().device().str()}].push_back(&bucket);
  }
  for (const auto& [kind, buckets] : alike) {
    std::vector<int64_t> numels;
    for (const auto* bucket : buckets) numels.push_back(bucket->numel());
    const auto most_unused = max_transient_bucket_bytes / static_cast<int64_t>(at::elementSize(kind.first));
    const auto sizes = common_sizes(numels, most_unused, most_times_larger);
    for (size_t i = 0; i < buckets.size(); ++i) buckets[i]->set_least_numel(sizes[i]);
  }
}

bool BucketSet::needs_fresh_memory(size_t gradient) const {
  const auto& bucket = of(gradient);
  return bucket.transient() && !bucket.sparse() && !bucket.flat().defined() &&
         !spare_.fits(bucket.numel(), bucket.options(), bucket.least_numel());
}

void BucketSet::set_frozen(std::vector<bool> frozen) {
  frozen_ = std::move(frozen);
  mark_last();
}

bool BucketSet::all_frozen(size_t index) const {
  const auto& members = buckets_[index].members();
  return std::all_of(members.begin(), members.end(), [this](size_t member) { return frozen_[member]; });
}

bool BucketSet::is_last(size_t index) const {
  while (++index < buckets_.size() && all_frozen(index)) continue;
  return index == buckets_.size();
}

bool BucketSet::any_trainable() const {
  return std::find(frozen_.begin(), frozen_.end(), false) != frozen_.end();
}

// Finds the bucket that communication hooks see as a step's last.
void BucketSet::mark_last() {
  bool found = false;
  for (size_t i = buckets_.size(); i-- > 0;) {
    const bool leaves = !buckets_[i].sparse() && !all_frozen(i) && buckets_[i].payload_numel() > 0;
    buckets_[i].set_last(leaves && !found);
    found = found || leaves;
  }
}

const at::Tensor& BucketSet::acquire(size_t gradient) {
  auto& bucket = of(gradient);
  bucket.acquire(group_, spare_);
  return bucket.view(places_[gradient].index);
}

void BucketSet::drop_gradients(size_t index) {
  const auto& flat = buckets_[index].flat();
  for (const auto member : buckets_[index].members()) {
    auto& grad = at::Tensor(gradients_[member].parameter).mutable_grad();
    if (same_storage(grad, flat)) grad.reset();
  }
}

void BucketSet::release(size_t index) {
  drop_gradients(index);
  buckets_[index].release(spare_, keeps_transient_);
}

}  // namespace shoal
