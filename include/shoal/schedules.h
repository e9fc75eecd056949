#pragma once
// Learning-rate schedules beyond libtorch's StepLR and ReduceLROnPlateau.

#include <torch/optim/schedulers/lr_scheduler.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace shoal {

// Each parameter group's rate is its own rate at construction times a factor that depends on the number of steps taken
// (Python's LambdaLR, one function for all groups). The rate of the first step is set at construction; call step()
// after each optimizer step. The optimizer must outlive the schedule. Not collective: equal calls give equal rates on
// all ranks. Not thread-safe.
//
// To go on from a checkpoint: construct the schedule on an optimizer with the rates it had at first, load the
// optimizer, then set_position().
class LambdaLR : public torch::optim::LRScheduler {
 public:
  using Factor = std::function<double(int64_t step)>;  // the number of steps taken, from 0

  LambdaLR(torch::optim::Optimizer& optimizer, Factor factor);

  // Steps taken.
  int64_t position() const;
  // UsageError below 0.
  void set_position(int64_t position);

 private:
  std::vector<double> get_lrs() override;

  Factor factor_;
  std::vector<double> base_rates_;
};

// From start_factor of the rate to the whole in warmup_steps steps, then constant: Python's LinearLR. UsageError for
// negative steps and for factors that are not in (0, 1].
class LinearWarmup : public LambdaLR {
 public:
  LinearWarmup(torch::optim::Optimizer& optimizer, int64_t warmup_steps, double start_factor = 1.0 / 3);
};

struct CosineWithWarmupOptions {
  int64_t total_steps = 0;     // the rate is constant afterwards
  int64_t warmup_steps = 0;    // less than total_steps; 0: none
  double start_factor = 1e-3;  // of the rate, at the first step of the warm-up
  double final_factor = 0;     // of the rate, at the end

  // Throws UsageError that lists all faults.
  void validate() const;
};

// A linear warm-up, then half a cosine wave down (Loshchilov and Hutter, "SGDR", 2017): Python's SequentialLR of
// LinearLR and CosineAnnealingLR.
class CosineWithWarmup : public LambdaLR {
 public:
  CosineWithWarmup(torch::optim::Optimizer& optimizer, const CosineWithWarmupOptions& options);
};

enum class Anneal { cosine, linear };

struct OneCycleOptions {
  int64_t total_steps = 0;         // at least 2; the rate is constant afterwards
  double rising = 0.3;             // the part of the steps in which the rate rises
  double initial_divisor = 25;     // of the rate, at the first step
  double final_divisor = 1e4;      // of the initial rate, at the last step
  Anneal anneal = Anneal::cosine;  // the curve of all phases
  bool three_phase = false;        // down as fast as up, then on to the final rate; not down in one go

  // Throws UsageError that lists all faults.
  void validate() const;
};

// Up to the optimizer's rate and down again. Smith and Topin, "Super-Convergence" (2018): Python's OneCycleLR with
// max_lr equal to each group's rate. The momentum stays as it is (cycle_momentum = False).
class OneCycle : public LambdaLR {
 public:
  OneCycle(torch::optim::Optimizer& optimizer, const OneCycleOptions& options);
};

}  // namespace shoal
