#pragma once
// Gradients that travel as integers of 8 bits, with a scale per block (Dettmers: "8-Bit Approximations for Parallelism
// in Deep Learning", ICLR 2016; in two rounds as in Bagua's ByteGrad, VLDB 2021).

#include <memory>

#include "shoal/engine/communication_hook.h"

namespace shoal {

struct QuantizeOptions {
  int64_t block = 256;         // elements that share a scale of 4 bytes: their largest absolute value / 127
  bool error_feedback = true;  // what rounding loses goes into the next step's gradient

  // Throws UsageError that lists all faults.
  void validate() const;
};

// Every rank gets all ranks' integers of its own part (an all-to-all) and adds them up in float32, in rank order. Where
// every rank needs the whole sum, the parts' sums travel as integers once more (an all-gather), whose rounding is not
// fed back. An owner gets everything from all. About a quarter of the bytes of float32, in one or two rounds.
//
// State: by parameter, what is owed to it; see PowerSgdHook for its units.
class QuantizeHook : public CommunicationHook {
 public:
  explicit QuantizeHook(const QuantizeOptions& options = {});
  ~QuantizeHook() override;
  std::string name() const override;
  PendingExchange begin(const GradientBucket& bucket) override;
  void reset() override;
  State state() const override;
  void load_state(const State& state) override;

 private:
  struct Memory;
  QuantizeOptions options_;
  std::unique_ptr<Memory> memory_;
};

}  // namespace shoal
