#pragma once
// One step of a training, measured.

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "shoal/training.h"

namespace shoal {

struct MeasuredStep {
  double loss = 0;       // mean over the micro-batches
  double wait_ms = 0;    // spent waiting for communication, also in the optimizer's step
  double update_ms = 0;  // spent in the optimizer's step, without waits
  int64_t calls = 0;     // this rank's collectives in all groups of the training
  int64_t bytes = 0;     // of these collectives
  double grads_mib = 0;  // memory of the gradients, if wanted

  // Communication that belongs to the step, too.
  void add(const GroupStatistics& communication);
};

// Runs step `number`: for each micro-batch `loss` and its backward, then the optimizer. Its parts are spans of the
// group's timeline. gradients: whether to measure their memory. Collective as the training is.
MeasuredStep measured_step(TrainingCore& training, int64_t number, int accumulate,
                           const std::function<at::Tensor(int micro)>& loss, bool gradients);
// The two halves of it, for Elastic: gradients, and the optimizer.
MeasuredStep measured_gradients(TrainingCore& training, int64_t number, int accumulate,
                                const std::function<at::Tensor(int micro)>& loss);
void measured_update(TrainingCore& training, int64_t number, bool gradients, MeasuredStep& step);

// Each tensor counts once: libtorch lists a tied parameter under each of its names.
double mebibytes(const std::vector<at::Tensor>& tensors);
// MiB of the state that this rank's optimizers keep, including copies of parameters in a wider dtype than the module's.
double state_mib(const TrainingCore& training, const torch::nn::Module& module);

}  // namespace shoal
