#pragma once
// Training under ShardedDataParallel, and the same in one process.

#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <vector>

#include "shoal/zero.h"
#include "tests/support/models.h"
#include "tests/support/world.h"

namespace shoal::test {

using Sgd = OSS<torch::optim::SGD>;

inline const torch::optim::SGDOptions sgd = torch::optim::SGDOptions(0.1).momentum(0.9);

// One process that sees every rank's batch.
class Reference {
 public:
  explicit Reference(Mlp model) : model_(std::move(model)), optimizer_(model_->parameters(), sgd) {}
  void step(int64_t number) {
    optimizer_.zero_grad();
    for (int rank = 0; rank < group().size(); ++rank) {
      (mean_loss(model_->forward(batch(rank, number))) / group().size()).backward();
    }
    optimizer_.step();
  }
  Mlp& model() { return model_; }

 private:
  Mlp model_;
  torch::optim::SGD optimizer_;
};

template <class Parallel>
void step(Parallel& parallel, std::vector<OSSCore*> optimizers, int64_t number) {
  mean_loss(parallel.forward(batch(group().rank(), number))).backward();
  for (auto* optimizer : optimizers) {
    optimizer->step();
    optimizer->zero_grad();
  }
}

}  // namespace shoal::test
