#pragma once
// Optimizer of all parameters, whose options a program changes in place of those of the buckets' optimizers.

#include <vector>

#include "strategy/decentralized/bucket.h"

namespace shoal {

// It is never stepped. The buckets' optimizers have the same param groups, each with the parameters of its bucket.
class WholeOptimizer {
 public:
  // scheduled: the buckets' optimizers have a schedule, which alone sets their rates. The reference must outlive this
  // object.
  WholeOptimizer(torch::optim::Optimizer& optimizer, bool scheduled) : optimizer_(optimizer), scheduled_(scheduled) {}

  torch::optim::Optimizer& optimizer() const { return optimizer_; }
  bool scheduled() const { return scheduled_; }
  // Gives the buckets' optimizers the options of this one, except scheduled rates. Call before a step.
  void give_options(std::vector<GossipBucket>& buckets) const;
  // Shows scheduled rates. Call after a step. Not before the first one: a program may make its schedule for this
  // optimizer, too, which takes the present rates for the initial ones.
  void show_rates(const std::vector<GossipBucket>& buckets) const;

 private:
  torch::optim::Optimizer& optimizer_;
  bool scheduled_;
};

}  // namespace shoal
