#pragma once
// PowerSGD: gradients of matrices travel as the product of two thin ones (Vogels, Karimireddy, Jaggi: "PowerSGD:
// Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS 2019).

#include <memory>

#include "shoal/engine/communication_hook.h"

namespace shoal {

struct PowerSgdOptions {
  int64_t rank = 1;                 // columns of the two factors; of a smaller matrix, all that it has
  int64_t start_iteration = 1000;   // steps before, which sum up as without compression
  double min_compression_rate = 2;  // a matrix of n x m is compressed where (n + m) * rank * rate < n * m; other
                                    // gradients travel whole
  bool error_feedback = true;       // what the factors leave out goes into the next step's gradient
  bool warm_start = true;           // start from the last step's factor; off: from a random one
  bool batched = false;             // a whole bucket is one square matrix: cheaper and less exact; rate has no effect
  uint64_t seed = 0;                // of the random factors; equal on all ranks

  // Throws UsageError that lists all faults.
  void validate() const;
};

// For those who want whole sums on every rank. A gradient of more than two dimensions is a matrix with its first one as
// rows. Two collectives a bucket: what is not compressed with the first factors, then the second ones; they travel
// through `carrier`, for example a CompressHook. With a rank as large as the matrices', exact but for rounding.
//
// State: by parameter, what is owed to it and its second factor, the same on all ranks; the number of steps. What is
// owed is in the units of the sums it was left out of: where the weights of a mean or a loss scale change between
// steps, its part changes with them.
class PowerSgdHook : public CommunicationHook {
 public:
  explicit PowerSgdHook(const PowerSgdOptions& options = {},
                        std::shared_ptr<CommunicationHook> carrier = std::make_shared<SumHook>());
  ~PowerSgdHook() override;
  std::string name() const override;
  bool serves(SumFor sum_for) const override { return sum_for == SumFor::everybody; }
  PendingExchange begin(const GradientBucket& bucket) override;
  void reset() override;
  State state() const override;
  void load_state(const State& state) override;

 private:
  struct Memory;
  PowerSgdOptions options_;
  std::shared_ptr<CommunicationHook> carrier_;
  std::shared_ptr<Memory> memory_;
};

}  // namespace shoal
