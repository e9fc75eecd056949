#include "engine/buckets/bucket_schedule.h"

#include <algorithm>
#include <thread>

#include "shoal/detail/clock.h"

namespace shoal {
namespace {

constexpr std::chrono::microseconds between_looks(50);

}  // namespace

BucketSchedule::BucketSchedule(const BucketSet& buckets, const Limits& limits, bool may_wait)
    : buckets_(buckets), limits_(limits), may_wait_(may_wait), ready_(buckets.places().size()), sums_(buckets.size()) {
  for (size_t i = 0; i < buckets.size(); ++i) {
    missing_.push_back(buckets.all_frozen(i) ? 0 : buckets[i].members().size());
  }
}

void BucketSchedule::mark_ready(size_t gradient) {
  ready_[gradient] = true;
  --missing_[buckets_.places()[gradient].bucket];
}

void BucketSchedule::pass_next() {
  if (transient(next_)) ++in_flight_;
  ++next_;
}

std::optional<size_t> BucketSchedule::take_back(bool all) {
  if (back_ == next_) return std::nullopt;
  auto& sum = sums_[back_];
  if (!all && !sum.work.done() && (in_flight_ <= limits_.in_flight || !comes_in_time(sum.work))) return std::nullopt;
  sum.work.wait();  // also releases what the work holds
  if (transient(back_)) --in_flight_;
  return back_++;
}

void BucketSchedule::await_oldest(std::chrono::microseconds limit) {
  if (back_ == next_ || !may_wait_) return;
  const auto until = Clock::now() + limit;
  while (!sums_[back_].work.done() && Clock::now() < until) std::this_thread::sleep_for(between_looks);
}

size_t BucketSchedule::most_spare(bool one_more) const {
  const size_t most = limits_.in_flight + (one_more ? 1 : 0);
  return most - std::min(in_flight_, most);
}

bool BucketSchedule::comes_in_time(Work& work) {
  if (!limits_.patience) return true;  // unlimited wait
  const auto until = Clock::now() + *limits_.patience;
  while (may_wait_ && !work.done()) {
    may_wait_ = Clock::now() < until;
    std::this_thread::sleep_for(between_looks);
  }
  return work.done();
}

}  // namespace shoal
