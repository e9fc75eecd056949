#pragma once
// Model under FullyShardedDataParallel, and the same in one process.

#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <functional>

#include "shoal/fsdp.h"
#include "tests/support/models.h"
#include "tests/support/training.h"
#include "tests/support/world.h"

namespace shoal::test {

using torch::optim::AdamWOptions;
using torch::optim::SGDOptions;
using Options = FullyShardedDataParallelOptions;

inline const SGDOptions sgd = SGDOptions(0.1).momentum(0.9);

// Every layer a unit.
inline Options by_layer() {
  return {.auto_wrap_policy = wrap_type<torch::nn::LinearImpl>()};
}

// Trains a model that forward() and loss() know, sharded and, with all ranks' batches, in one process; compares.
template <class Module, class Loss>
void expect_equal_training(const std::function<std::shared_ptr<Module>()>& make, const Loss& loss,
                           const Options& options = by_layer(), int steps = 4) {
  FullyShardedDataParallel<Module> parallel(make(), group(), options);
  FullyShardedOptimizer<torch::optim::SGD> optimizer(parallel, sgd);
  const auto reference = make();
  torch::optim::SGD reference_optimizer(distinct(reference->parameters()), sgd);
  for (int64_t step = 0; step < steps; ++step) {
    loss(parallel, *parallel.module(), batch(group().rank(), step)).backward();
    optimizer.step();
    optimizer.zero_grad();
    for (int rank = 0; rank < group().size(); ++rank) {
      (loss(*reference, *reference, batch(rank, step)) / group().size()).backward();
    }
    reference_optimizer.step();
    reference_optimizer.zero_grad();
    ASSERT_LT(difference(parallel.module()->parameters(), reference->parameters()), 1e-12) << "step " << step;
  }
}

inline std::shared_ptr<MlpImpl> make_mlp() {
  return seeded(1).ptr();
}

}  // namespace shoal::test
