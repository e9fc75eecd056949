#include "engine/sharded/ownership.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <optional>
#include <string>

namespace shoal {

void assign_owners(const std::vector<at::Tensor>& parameters, int ranks, std::vector<int>& owners) {
  std::vector<int64_t> load(ranks);
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (owners[i] >= 0) load[owners[i]] += parameters[i].numel();
  }
  for (size_t i = parameters.size(); i-- > 0;) {
    if (owners[i] >= 0) continue;
    const auto least = std::min_element(load.begin(), load.end());
    *least += parameters[i].numel();
    owners[i] = static_cast<int>(least - load.begin());
  }
}

void balance_owners(const std::vector<at::Tensor>& parameters, int ranks, std::vector<int>& owners) {
  std::vector<int64_t> load(ranks);
  int64_t largest = 0;
  for (size_t i = 0; i < parameters.size(); ++i) {
    load[owners[i]] += parameters[i].numel();
    largest = std::max(largest, parameters[i].numel());
  }
  while (true) {
    const auto most = std::max_element(load.begin(), load.end());
    const auto least = std::min_element(load.begin(), load.end());
    const auto gap = *most - *least;
    if (gap <= largest) return;
    // Half the gap would make the two equal.
    std::optional<size_t> best;
    const auto off = [&](size_t i) { return std::abs(2 * parameters[i].numel() - gap); };
    for (size_t i = parameters.size(); i-- > 0;) {
      if (owners[i] == most - load.begin() && parameters[i].numel() > 0 && (!best || off(i) < off(*best))) best = i;
    }
    *most -= parameters[*best].numel();
    *least += parameters[*best].numel();
    owners[*best] = static_cast<int>(least - load.begin());
  }
}

std::vector<OwnedBuffer> owned_buffers(const std::vector<at::Tensor>& parameters, const std::vector<int>& owners,
                                       int ranks) {
  std::map<std::pair<at::ScalarType, std::string>, std::vector<size_t>> kinds;
  for (size_t i = parameters.size(); i-- > 0;) {
    kinds[{parameters[i].scalar_type(), parameters[i].device().str()}].push_back(i);
  }
  std::vector<OwnedBuffer> buffers;
  for (auto& [kind, members] : kinds) {
    std::stable_sort(members.begin(), members.end(), [&](size_t a, size_t b) { return owners[a] < owners[b]; });
    std::vector<int64_t> numels;
    for (const auto member : members) numels.push_back(parameters[member].numel());
    FlatLayout layout(numels, c10::elementSize(kind.first));
    std::vector<Range> ranges(ranks);
    for (size_t piece = 0; piece < members.size(); ++piece) {
      auto& range = ranges[owners[members[piece]]];
      if (range.empty()) range.begin = layout.range(piece).begin;
      range.end = layout.range(piece).end;
    }
    buffers.push_back({std::move(members), std::move(layout), std::move(ranges)});
  }
  return buffers;
}

}  // namespace shoal
