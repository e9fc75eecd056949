#pragma once
// Post-local SGD: after some steps ranks add up gradients within small groups only, and average their parameters from
// time to time (Lin, Stich, Patel, Jaggi: "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020).

#include <memory>
#include <vector>

#include "shoal/engine/communication_hook.h"

namespace shoal {

// From step `start_iteration` (0: the first) on, sums are over `local` alone, scaled up to means over it; before, over
// all ranks. Both travel through `carrier`. For those who want whole sums on every rank. A PeriodicModelAverager brings
// the sub-groups' parameters together again.
//
// With weights, a sub-group's gradient is divided by the mean over sub-groups of their weights: so the average over
// sub-groups is the exact weighted mean over all ranks.
class PostLocalSgdHook : public CommunicationHook {
 public:
  // local: of the same size on all ranks, for example Group::by_host(). UsageError for a negative start.
  PostLocalSgdHook(Group local, int64_t start_iteration,
                   std::shared_ptr<CommunicationHook> carrier = std::make_shared<SumHook>());
  ~PostLocalSgdHook() override;
  std::string name() const override;
  bool serves(SumFor sum_for) const override { return sum_for == SumFor::everybody; }
  PendingExchange begin(const GradientBucket& bucket) override;
  void reset() override { carrier_->reset(); }
  State state() const override;
  void load_state(const State& state) override;

 private:
  struct Memory;
  Group local_;
  int64_t start_;
  std::shared_ptr<CommunicationHook> carrier_;
  std::unique_ptr<Memory> memory_;
};

// Averages parameters over ranks every `period` steps: after those whose number, from 0, is warmup_steps, warmup_steps +
// period, and so on. So the first average follows the first step after the warm-up, as in PyTorch.
class PeriodicModelAverager {
 public:
  // warmup_steps: before the first average, usually the hook's start_iteration. UsageError for period < 1 or a negative
  // warm-up.
  PeriodicModelAverager(Group group, int64_t period, int64_t warmup_steps = 0);
  // After every optimizer step. Floating-point parameters become their means over the ranks when it is time: then
  // collective, and true.
  bool average(const std::vector<at::Tensor>& parameters);

 private:
  Group group_;
  int64_t period_;
  int64_t warmup_steps_;
  int64_t steps_ = 0;
};

}  // namespace shoal
