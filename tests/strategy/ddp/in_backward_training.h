#pragma once
// Model under DistributedDataParallel whose optimizer runs inside backward, or after it.

#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <functional>
#include <memory>
#include <optional>

#include "shoal/optimizer_in_backward.h"
#include "tests/support/models.h"
#include "tests/support/world.h"

namespace shoal::test {

using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>;

inline MakeOptimizer momentum_sgd() {
  return [](std::vector<at::Tensor> parameters) {
    return std::make_unique<torch::optim::SGD>(std::move(parameters), torch::optim::SGDOptions(0.1).momentum(0.9));
  };
}

inline MakeOptimizer adamw() {
  return [](std::vector<at::Tensor> parameters) {
    return std::make_unique<torch::optim::AdamW>(std::move(parameters), torch::optim::AdamWOptions(1e-2));
  };
}

// Several buckets, so that the first ones are reduced early.
inline DistributedDataParallelOptions small_buckets() {
  return {.bucket_cap_mb = 1e-4, .first_bucket_mb = 1e-4};
}

template <class Module>
struct InBackwardTraining {
  InBackwardTraining(std::shared_ptr<Module> trained, const MakeOptimizer& make,
                     const std::optional<OptimizerInBackwardOptions>& in_backward,
                     const DistributedDataParallelOptions& options = small_buckets())
      : model(std::move(trained)), optimizer(make(model->parameters())), parallel(model, group(), options) {
    if (in_backward) inside.emplace(parallel, *optimizer, *in_backward);
  }
  void end_step() {
    if (inside) return;
    optimizer->step();
    optimizer->zero_grad();
  }

  std::shared_ptr<Module> model;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  DistributedDataParallel<Module> parallel;
  std::optional<OptimizerInBackward> inside;
};

// Expects equality bit for bit.
inline void expect_equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i].detach(), b[i].detach())) << "tensor " << i;
}

}  // namespace shoal::test
