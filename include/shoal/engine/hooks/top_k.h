#pragma once
// The largest elements of each gradient travel, the others wait (Stich, Cordonnier, Jaggi: "Sparsified SGD with
// Memory", NeurIPS 2018; Lin et al.: "Deep Gradient Compression", ICLR 2018).

#include <memory>

#include "shoal/engine/communication_hook.h"

namespace shoal {

struct TopKOptions {
  double fraction = 0.01;      // of each parameter's elements, above 0 and at most 1; at least one element
  bool error_feedback = true;  // what does not travel goes into the next step's gradient

  // Throws UsageError that lists all faults.
  void validate() const;
};

// Each rank sends its own choice, with positions of 4 bytes, to all ranks, which add them up in rank order; to the
// owner alone where only it gets the sum. Where ranks get a part of the sum each, they take it from what all get: a
// reduce-scatter cannot know which elements come.
//
// State: by parameter, what is owed to it; see PowerSgdHook for its units.
class TopKHook : public CommunicationHook {
 public:
  explicit TopKHook(const TopKOptions& options = {});
  ~TopKHook() override;
  std::string name() const override;
  PendingExchange begin(const GradientBucket& bucket) override;
  void reset() override;
  State state() const override;
  void load_state(const State& state) override;

 private:
  struct Memory;
  TopKOptions options_;
  std::unique_ptr<Memory> memory_;
};

}  // namespace shoal
