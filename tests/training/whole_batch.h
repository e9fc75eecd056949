#pragma once
// Trainings of the registry's strategies on a whole batch, and one process that does the same.

#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/sgd.h>

#include <vector>

#include "shoal/training.h"
#include "tests/support/models.h"
#include "tests/support/world.h"

namespace shoal::test::whole_batches {

inline constexpr int steps = 4;
inline constexpr int micros = 2;
inline constexpr double largest_norm = 0.05;  // less than any here
inline const auto sgd = torch::optim::SGDOptions(0.1).momentum(0.9);

// Several buckets, units and fragments of a small model; exchanges after every step that change nothing where ranks
// have the same.
inline const StrategyOptions small{
    {"bucket_cap_mb", "0.0005"}, {"first_bucket_mb", "0.0005"}, {"bucket_size", "100"}, {"reduce_buffer_size", "100"},
    {"unit_numel", "100"},       {"sync_every", "1"},           {"outer_lr", "1"},      {"outer_momentum", "0"}};

inline bool shares_batches(const Strategy& strategy) {
  return strategy.synchronization == Synchronization::lockstep && !strategy.has("sync_every");
}

inline at::Tensor whole_batch(int64_t step, int64_t micro) {
  return batch(0, step, micro, /*samples=*/12);
}

// One process: the whole batch, libtorch's optimizer and its clipping.
inline std::vector<at::Tensor> reference() {
  auto model = seeded(3);
  torch::optim::SGD optimizer(model->parameters(), sgd);
  for (int64_t step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    for (int64_t micro = 0; micro < micros; ++micro) {
      (mean_loss(model->forward(whole_batch(step, micro))) / micros).backward();
    }
    const double norm = torch::nn::utils::clip_grad_norm_(model->parameters(), largest_norm);
    EXPECT_GT(norm, largest_norm) << "clipping takes part";
    optimizer.step();
  }
  return model->parameters();
}

// Where one rank is all that a strategy has.
inline Group group_of(const Strategy& strategy) {
  return strategy.synchronization == Synchronization::single_rank ? group().subgroup({group().rank()}) : group();
}

inline void train(Training<MlpImpl>& training, int64_t from, int64_t to) {
  const auto& ranks = training->group();
  const bool shares = shares_batches(training->strategy());
  for (int64_t step = from; step < to; ++step) {
    for (int64_t micro = 0; micro < micros; ++micro) {
      const auto all = whole_batch(step, micro);
      const auto mine = shares ? all.chunk(ranks.size())[ranks.rank()] : all;
      const auto scope = training->no_sync(micro + 1 < micros);
      training->backward(mean_loss(training.forward(mine)) / micros);
    }
    EXPECT_TRUE(training->step());
    training->zero_grad();
  }
}

// Collective.
inline std::vector<at::Tensor> whole(Training<MlpImpl>& training) {
  const auto scope = training->full_parameters();
  std::vector<at::Tensor> list;
  for (const auto& parameter : training.module()->parameters()) list.push_back(parameter.detach().clone());
  return list;
}

}  // namespace shoal::test::whole_batches
