#pragma once
// Training under DistributedOptimizer, and its gradients in one process.

#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/utils.h>

#include "shoal/megatron.h"
#include "tests/support/models.h"
#include "tests/support/world.h"

namespace shoal::test {

using torch::optim::AdamWOptions;
using torch::optim::SGDOptions;
using Sgd = DistributedOptimizer<torch::optim::SGD>;

inline const SGDOptions sgd = SGDOptions(0.1).momentum(0.9);

inline Mlp seeded_as(at::ScalarType dtype) {
  auto model = seeded(1);
  model->to(dtype);
  return model;
}

// Adds the mean gradient of one step over all ranks' batches.
inline void add_mean_gradient(Mlp& model, int64_t step, int micros = 1) {
  const auto dtype = model->first->weight.scalar_type();
  for (int rank = 0; rank < group().size(); ++rank) {
    for (int micro = 0; micro < micros; ++micro) {
      (mean_loss(model->forward(batch(rank, step, micro).to(dtype))) / (group().size() * micros)).backward();
    }
  }
}

inline void backward(Mlp& model, const DistributedOptimizerCore& optimizer, int64_t step, int micro = 0,
                     int micros = 1) {
  const auto dtype = model->first->weight.scalar_type();
  const auto loss = mean_loss(model->forward(batch(group().rank(), step, micro).to(dtype))) / micros;
  optimizer.scale_loss(loss).backward();
}

}  // namespace shoal::test
