#pragma once
// Small model on a ring, and its simulation, for tests of decentralised training.

#include <gtest/gtest.h>

#include "shoal/decentralized.h"
#include "tests/strategy/decentralized/decentralized_simulation.h"
#include "tests/support/models.h"
#include "tests/support/world.h"

namespace shoal::test {

inline const torch::optim::SGDOptions momentum_sgd = torch::optim::SGDOptions(0.1).momentum(0.9);
constexpr double small_bucket = 0.001;  // MiB; several buckets

inline int me() {
  return group().rank();
}
inline Topology ring() {
  return make_topology("ring", group().size());
}
inline OptimizerRecipe plain() {
  return optimizer_recipe<torch::optim::SGD>(momentum_sgd);
}
inline Simulation<MlpImpl> simulated() {
  return {ring(), [] { return seeded(1).ptr(); }, momentum_sgd};
}
inline auto loss_of(int64_t step) {
  return [step](MlpImpl& model, int rank) { return mean_loss(model.forward(batch(rank, step))); };
}
inline void expect_equal(const Mlp& model, Simulation<MlpImpl>& simulation, double tolerance = 1e-11) {
  EXPECT_LT(difference(model->parameters(), simulation.model(me()).parameters()), tolerance);
}

}  // namespace shoal::test
