#pragma once
// Gradients that travel, and are added up, in 16 bits.

#include <memory>

#include "shoal/engine/communication_hook.h"

namespace shoal {

// Half the bytes of float32; gradients that have 16 bits travel as they are. Gradients come divided by the number of
// ranks, so that sums stay in the range of float16 where means do. grad() and what micro-batches add up on a rank keep
// the parameter's dtype. Extra memory: the 16-bit copies of the buckets in flight, kept for the next ones.
class CompressHook : public CommunicationHook {
 public:
  // dtype: float16 or bfloat16; UsageError otherwise.
  explicit CompressHook(at::ScalarType dtype);
  ~CompressHook() override;
  std::string name() const override;
  PendingExchange begin(const GradientBucket& bucket) override;

 private:
  struct Spare;
  at::ScalarType dtype_;
  std::shared_ptr<Spare> spare_;
};

}  // namespace shoal
