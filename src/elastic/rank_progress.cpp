#include "elastic/rank_progress.h"

#include <torch/types.h>

#include <algorithm>

namespace shoal {

RankProgress::Row RankProgress::to_row() const {
  return {changes,        static_cast<int64_t>(ready), newcomer ? 1 : 0, proven ? 1 : 0,
          together_calls, longest_wait.count(),        passes,           place,
          step_places};
}

RankProgress RankProgress::from_row(const Row& row) {
  return {.changes = row[0],
          .ready = static_cast<Ready>(row[1]),
          .newcomer = row[2] != 0,
          .proven = row[3] != 0,
          .together_calls = row[4],
          .longest_wait = std::chrono::milliseconds(row[5]),
          .passes = row[6],
          .place = row[7],
          .step_places = row[8]};
}

std::vector<RankProgress> gather_progress(const Group& group, const RankProgress& own) {
  auto row = own.to_row();
  const auto sent = at::from_blob(row.data(), {static_cast<int64_t>(row.size())}, at::kLong);
  auto all = at::empty({group.size() * sent.numel()}, at::kLong);
  group.all_gather(all, sent, {-1, -1, "how far the ranks are"}).wait();
  std::vector<RankProgress> ranks;
  for (int rank = 0; rank < group.size(); ++rank) {
    std::copy_n(all.const_data_ptr<int64_t>() + rank * sent.numel(), row.size(), row.begin());
    ranks.push_back(RankProgress::from_row(row));
  }
  return ranks;
}

RecoveryDecision decide(const std::vector<RankProgress>& holders, bool in_step) {
  RecoveryDecision decision{.least = holders.front().changes, .most = holders.front().changes};
  bool all_can = in_step;
  for (const auto& rank : holders) {
    decision.least = std::min(decision.least, rank.changes);
    decision.most = std::max(decision.most, rank.changes);
    all_can = all_can && rank.ready == Ready::yes;
  }
  decision.all_finish = all_can && decision.least == decision.most;
  return decision;
}

}  // namespace shoal
