#pragma once
// Learning-rate schedules, in addition to libtorch's StepLR and ReduceLROnPlateau.

#include <torch/optim/schedulers/lr_scheduler.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace shoal {

// Schedule that multiplies each param group's initial rate by a function of the number of steps taken, like PyTorch's
// LambdaLR with one function for all groups. Construction sets the rate of the first step; call step() after each
// optimizer step. The optimizer must outlive the schedule. Not collective: the same calls give the same rates on all
// ranks. Not thread-safe.
//
// To resume from a checkpoint: construct the schedule on an optimizer with its initial rates, load the optimizer, then
// call set_position().
class LambdaLR : public torch::optim::LRScheduler {
 public:
  using Factor = std::function<double(int64_t step)>;  // step: number of steps taken, from 0

  LambdaLR(torch::optim::Optimizer& optimizer, Factor factor);

  // Number of steps taken.
  int64_t position() const;
  // Throws UsageError for a negative position.
  void set_position(int64_t position);
  // The same schedule at the same position, on another optimizer with as many param groups, whose rates it sets: for
  // the new optimizer after Training::replan(). Does not use the former optimizer, which may be gone. Throws UsageError
  // for another number of groups.
  std::unique_ptr<LambdaLR> on(torch::optim::Optimizer& optimizer) const;

 private:
  LambdaLR(torch::optim::Optimizer& optimizer, const LambdaLR& other);
  std::vector<double> get_lrs() override;

  Factor factor_;
  std::vector<double> base_rates_;
};

// Linear warm-up from start_factor times the rate to the rate in warmup_steps steps, then constant, like PyTorch's
// LinearLR. Throws UsageError for negative steps and for factors outside (0, 1].
class LinearWarmup : public LambdaLR {
 public:
  LinearWarmup(torch::optim::Optimizer& optimizer, int64_t warmup_steps, double start_factor = 1.0 / 3);
};

struct CosineWithWarmupOptions {
  int64_t total_steps = 0;     // the rate is constant afterwards
  int64_t warmup_steps = 0;    // less than total_steps; 0: none
  double start_factor = 1e-3;  // factor of the rate at the first warm-up step
  double final_factor = 0;     // factor of the rate at the end

  // Throws UsageError with a list of all invalid options.
  void validate() const;
};

// Linear warm-up followed by cosine annealing (Loshchilov and Hutter, "SGDR", 2017), like PyTorch's SequentialLR of
// LinearLR and CosineAnnealingLR.
class CosineWithWarmup : public LambdaLR {
 public:
  CosineWithWarmup(torch::optim::Optimizer& optimizer, const CosineWithWarmupOptions& options);
};

enum class Anneal { cosine, linear };

struct OneCycleOptions {
  int64_t total_steps = 0;         // at least 2; the rate is constant afterwards
  double rising = 0.3;             // fraction of the steps in which the rate rises (pct_start)
  double initial_divisor = 25;     // the first rate is the rate divided by this (div_factor)
  double final_divisor = 1e4;      // the last rate is the first rate divided by this (final_div_factor)
  Anneal anneal = Anneal::cosine;  // shape of all phases
  bool three_phase = false;        // fall symmetrically to the first rate, then on to the last; off: fall to the last
                                   // rate in one phase

  // Throws UsageError with a list of all invalid options.
  void validate() const;
};

// One-cycle schedule: rises to the optimizer's rate, then falls. Source: Smith and Topin, "Super-Convergence" (2018);
// like PyTorch's OneCycleLR with max_lr equal to each group's rate. Momentum is unchanged (cycle_momentum = False).
class OneCycle : public LambdaLR {
 public:
  OneCycle(torch::optim::Optimizer& optimizer, const OneCycleOptions& options);
};

}  // namespace shoal
