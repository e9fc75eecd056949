#include "strategy/decentralized/whole_optimizer.h"

#include <algorithm>

namespace shoal {

void WholeOptimizer::give_options(std::vector<GossipBucket>& buckets) const {
  const auto& groups = optimizer_.param_groups();
  for (auto& bucket : buckets) {
    auto& own = bucket.optimizer->param_groups();
    for (size_t number = 0; number < std::min(own.size(), groups.size()); ++number) {
      auto options = groups[number].options().clone();
      if (scheduled_) options->set_lr(own[number].options().get_lr());
      own[number].set_options(std::move(options));
    }
  }
}

void WholeOptimizer::show_rates(const std::vector<GossipBucket>& buckets) const {
  if (!scheduled_ || buckets.empty()) return;
  auto& groups = optimizer_.param_groups();
  const auto& own = buckets.front().optimizer->param_groups();
  for (size_t number = 0; number < std::min(own.size(), groups.size()); ++number) {
    groups[number].options().set_lr(own[number].options().get_lr());
  }
}

}  // namespace shoal
