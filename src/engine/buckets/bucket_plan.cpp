#include "engine/buckets/bucket_plan.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "layout/flat_layout.h"

namespace shoal {

std::vector<std::vector<size_t>> plan_buckets(const std::vector<Gradient>& gradients, std::span<const size_t> order,
                                              int64_t first_cap_bytes, int64_t cap_bytes, std::span<const int> owners,
                                              std::optional<int64_t> most_numel) {
  struct Open {
    std::vector<size_t> members;
    int64_t bytes = 0;
    int64_t numel = 0;  // of the flat buffer, alignment included
    size_t last = 0;    // position in `order` of the newest member
    bool first = true;
  };
  struct Closed {
    std::vector<size_t> members;
    size_t last;
  };
  std::map<std::tuple<c10::ScalarType, c10::ScalarType, std::string, int>, Open> open;
  std::vector<Closed> closed;
  const auto close = [&closed](Open& bucket) {
    closed.push_back({std::exchange(bucket.members, {}), bucket.last});
    bucket.bytes = 0;
    bucket.numel = 0;
    bucket.first = false;
  };
  for (size_t position = 0; position < order.size(); ++position) {
    const auto& gradient = gradients[order[position]];
    if (gradient.sparse) {
      closed.push_back({{order[position]}, position});
      continue;
    }
    const int owner = owners.empty() ? -1 : owners[order[position]];
    const auto& parameter = gradient.parameter;
    auto& bucket = open[{gradient.dtype(), parameter.scalar_type(), parameter.device().str(), owner}];
    const auto element_bytes = c10::elementSize(gradient.dtype());
    const auto numel = FlatLayout(std::vector{parameter.numel()}, element_bytes).size();
    if (most_numel && !bucket.members.empty() && bucket.numel + numel > *most_numel) close(bucket);
    bucket.members.push_back(order[position]);
    bucket.bytes += parameter.numel() * static_cast<int64_t>(element_bytes);
    bucket.numel += numel;
    bucket.last = position;
    if (bucket.bytes >= (bucket.first ? first_cap_bytes : cap_bytes)) close(bucket);
  }
  for (auto& [key, bucket] : open) {
    if (!bucket.members.empty()) closed.push_back({std::move(bucket.members), bucket.last});
  }
  std::sort(closed.begin(), closed.end(), [](const Closed& a, const Closed& b) { return a.last < b.last; });
  std::vector<std::vector<size_t>> plan;
  for (auto& bucket : closed) plan.push_back(std::move(bucket.members));
  return plan;
}

}  // namespace shoal
