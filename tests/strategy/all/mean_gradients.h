#pragma once
// Gradients as after an all-reduce over an optimizer's ranks.

#include <torch/types.h>
#include <torch/utils.h>

#include "tests/support/models.h"
#include "tests/support/world.h"

namespace shoal::test {

// Sets the mean over ranks of one step's gradients, on every rank, without communication.
inline void set_mean_gradients(Mlp& model, int64_t step) {
  auto copy = seeded(1);
  const torch::NoGradGuard no_grad;
  for (size_t i = 0; i < model->parameters().size(); ++i) copy->parameters()[i].copy_(model->parameters()[i]);
  {
    const at::AutoGradMode grad(true);
    for (int rank = 0; rank < group().size(); ++rank) {
      (mean_loss(copy->forward(batch(rank, step))) / group().size()).backward();
    }
  }
  for (size_t i = 0; i < model->parameters().size(); ++i) {
    model->parameters()[i].mutable_grad() = copy->parameters()[i].grad().clone();
  }
}

}  // namespace shoal::test
