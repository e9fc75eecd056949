#pragma once
// Training in a Join, and the same in one process.

#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <functional>

#include "tests/support/models.h"
#include "tests/support/training.h"
#include "tests/support/world.h"

namespace shoal::test {

inline const torch::optim::SGDOptions sgd = torch::optim::SGDOptions(0.1).momentum(0.9);

// Number of batches of each rank.
using Counts = std::function<int64_t(int rank)>;

inline int64_t five_and_rank(int rank) {
  return 5 + rank;
}

inline int64_t most(const Counts& counts) {
  int64_t most = 0;
  for (int rank = 0; rank < group().size(); ++rank) most = std::max(most, counts(rank));
  return most;
}

template <class Module>
Training<Module> make_of(const std::string& strategy, std::shared_ptr<Module> model,
                         const TrainingOptions& options = {.bucket_mb = 1e-3}, const Group& on = group()) {
  return Training<Module>::template make<torch::optim::SGD>(strategy, std::move(model), on, sgd, options);
}

inline Training<MlpImpl> make(const std::string& strategy, const TrainingOptions& options = {.bucket_mb = 1e-3},
                              const Group& on = group()) {
  return make_of(strategy, seeded(3).ptr(), options, on);
}

// The whole scope in one process.
inline std::vector<at::Tensor> reference(const Counts& counts, const std::function<double(int64_t step)>& divisor,
                                         int64_t steps = -1) {
  auto model = seeded(3);
  torch::optim::SGD optimizer(model->parameters(), sgd);
  for (int64_t step = 0; step < (steps < 0 ? most(counts) : steps); ++step) {
    optimizer.zero_grad();
    for (int rank = 0; rank < group().size(); ++rank) {
      if (step < counts(rank)) (mean_loss(model->forward(batch(rank, step))) / divisor(step)).backward();
    }
    optimizer.step();
  }
  return model->parameters();
}

inline double initial(int64_t) {
  return group().size();
}

inline std::function<double(int64_t)> active(const Counts& counts) {
  return [counts](int64_t step) {
    double ranks = 0;
    for (int rank = 0; rank < group().size(); ++rank) ranks += step < counts(rank) ? 1 : 0;
    return ranks;
  };
}

// Expects the same bits as on rank 0.
inline void expect_same_on_all_ranks(const std::vector<at::Tensor>& tensors) {
  for (const auto& tensor : tensors) {
    auto first = tensor.detach().clone();
    group().broadcast(first, 0).wait();
    EXPECT_TRUE(at::equal(first, tensor.detach()));
  }
}

template <class Module>
void pass(Training<Module>& training, const Join& join, int64_t number) {
  if (join.active()) {
    mean_loss(training.forward(batch(group().rank(), number))).backward();
  } else {
    training.shadow();
  }
}

template <class Module>
int64_t run(Training<Module>& training, Join& join, int64_t batches) {
  int64_t number = 0;
  for (; join.next(number < batches); ++number) {
    pass(training, join, number);
    training.step();
    training.zero_grad();
  }
  return number;
}

class JoinStrategies : public testing::TestWithParam<std::string> {};

}  // namespace shoal::test
