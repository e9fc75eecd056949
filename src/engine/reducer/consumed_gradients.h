#pragma once
// Passage of means to a GradientConsumer.

#include <string>
#include <vector>

#include "engine/buckets/bucket_set.h"
#include "engine/gradients/spent_gradients.h"
#include "engine/reducer/gradient_consumer.h"

namespace shoal {

class ConsumedGradients {
 public:
  // The references must outlive this object. who, about: see SpentGradients.
  ConsumedGradients(const std::vector<Gradient>& gradients, BucketSet& buckets, GradientConsumer& consumer,
                    std::string who, std::string about);

  // Call when a step begins. Whether a bucket may be taken as soon as it has been reduced.
  bool come_early() const;
  // The means of a bucket are in grad(), from where the consumer takes them.
  void take(size_t bucket);
  // The same for all buckets, if means are known only at the end of backward.
  void take_all();
  // used: by gradient.
  void end_step(const std::vector<bool>& used);
  void abandon_step() { consumer_.end_step(/*abandoned=*/true); }
  // Call before new gradients arrive. See SpentGradients.
  void clear() { spent_.clear(); }

 private:
  bool knows_means_early() const;

  const std::vector<Gradient>& gradients_;
  BucketSet& buckets_;
  GradientConsumer& consumer_;
  SpentGradients spent_;
};

}  // namespace shoal
