#include "engine/buckets/reduction_plan.h"

#include <algorithm>
#include <numeric>

namespace shoal {

std::vector<std::vector<size_t>> ReductionPlan::buckets(const std::vector<Gradient>& gradients,
                                                        std::span<const size_t> order) const {
  std::vector<size_t> registered(gradients.size());
  std::iota(registered.rbegin(), registered.rend(), 0);
  return plan_buckets(gradients, follows_order ? order : registered, caps.first_bytes, caps.bytes, divided,
                      caps.most_numel);
}

FlatLayout ReductionPlan::layout(std::span<const int64_t> numels, size_t element_bytes) const {
  return keeps == SumResult::ranges ? scatter_layout(numels, element_bytes, ranges) : FlatLayout(numels, element_bytes);
}

Range ReductionPlan::kept(const Bucket& bucket, int place) const {
  if (keeps == SumResult::ranges) return bucket.layout().part(place);
  return keeps_whole(bucket, place) ? Range{0, bucket.payload_numel()} : Range{};
}

bool ReductionPlan::keeps_whole(const Bucket& bucket, int place) const {
  if (keeps == SumResult::owner) return owners[bucket.members().front()] == place;
  return everywhere();
}

bool ReductionPlan::trailer_apart(const std::vector<Gradient>& gradients) const {
  const bool exact = std::any_of(gradients.begin(), gradients.end(), [](const Gradient& gradient) {
    return gradient.sparse || c10::elementSize(gradient.dtype()) >= 4;
  });
  // To write or read a trailer on a device, the CPU waits for the device. Sums that are consumed within the step need
  // their weight at once.
  const bool waits = !consumed && std::any_of(gradients.begin(), gradients.end(), [](const Gradient& gradient) {
    return !gradient.parameter.device().is_cpu();
  });
  return !everywhere() || !trailer_rides || !exact || waits;
}

at::ScalarType ReductionPlan::trailer_dtype(const std::vector<Gradient>& gradients) {
  const bool wide = std::any_of(gradients.begin(), gradients.end(),
                                [](const Gradient& gradient) { return gradient.dtype() == at::kDouble; });
  return wide ? at::kDouble : at::kFloat;
}

FlatLayout scatter_layout(std::span<const int64_t> numels, size_t element_bytes, int ranks) {
  constexpr int64_t aligned_elements = 64;
  return {numels, element_bytes, aligned_elements * static_cast<int64_t>(element_bytes), ranks};
}

}  // namespace shoal
