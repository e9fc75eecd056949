// DecentralizedDataParallel against a dense simulation of all ranks in one process (rows DEC01 to DEC16).

#include "shoal/strategy/decentralized.h"

#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include "shoal/base/error.h"
#include "tests/support/models.h"
#include "tests/support/world.h"

namespace shoal {
namespace {

using test::batch;
using test::difference;
using test::mean_loss;
using test::Mlp;
using test::seeded;
using test::world;
using Options = DecentralizedDataParallelOptions;

const torch::optim::SGDOptions sgd = torch::optim::SGDOptions(0.1).momentum(0.9);

const Group& group() {
  return world().group();
}

// Every rank's model and optimizer, and whole matrices.
class Simulation {
 public:
  explicit Simulation(Topology topology) : topology_(std::move(topology)) {
    for (int rank = 0; rank < topology_.size(); ++rank) {
      models_.push_back(seeded(1));
      optimizers_.push_back(std::make_unique<torch::optim::SGD>(models_.back()->parameters(), sgd));
    }
  }
  // After the ranks' gradients have been computed.
  void finish_step() {
    if (steps_ > 0) mix();
    for (auto& optimizer : optimizers_) {
      optimizer->step();
      optimizer->zero_grad();
    }
    ++steps_;
  }
  void step(int64_t number) {
    for (size_t rank = 0; rank < models_.size(); ++rank) {
      mean_loss(models_[rank]->forward(batch(static_cast<int>(rank), number))).backward();
    }
    finish_step();
  }
  Mlp& model(int rank) { return models_[rank]; }

 private:
  void mix() {
    const torch::NoGradGuard no_grad;
    const auto n = static_cast<int>(models_.size());
    auto matrix = at::zeros({n, n}, at::kDouble);
    const auto& round = topology_.round(steps_);
    for (int i = 0; i < n; ++i) {
      matrix[i][i] = round.self(i);
      for (const auto& [j, weight] : round.sources(i)) matrix[i][j] = weight;
    }
    for (size_t p = 0; p < models_[0]->parameters().size(); ++p) {
      std::vector<at::Tensor> rows;
      for (auto& model : models_) rows.push_back(model->parameters()[p].flatten());
      const auto mixed = at::matmul(matrix, at::stack(rows));
      for (int i = 0; i < n; ++i) {
        auto parameter = models_[i]->parameters()[p];
        parameter.copy_(mixed[i].view_as(parameter));
      }
    }
  }

  Topology topology_;
  std::vector<Mlp> models_;
  std::vector<std::unique_ptr<torch::optim::SGD>> optimizers_;
  int64_t steps_ = 0;
};

std::vector<std::string> names() {
  return {"complete", "ring", "one-peer-exp", "alternating-exp-ring", "exp", "torus", "hypercube", "star", "random"};
}

TEST(Decentralized, DEC01_every_topology_equals_a_dense_simulation) {
  for (const auto& name : names()) {
    for (const bool views : {true, false}) {
      const auto topology = make_topology(name, group().size(), 1, 7);
      Simulation simulation(topology);
      auto model = seeded(1);
      DecentralizedDataParallel parallel(
          model, optimizer_with<torch::optim::SGD>(sgd), group(),
          Options{.topology = topology, .bucket_cap_mb = 0.001, .param_as_bucket_view = views});
      for (int64_t step = 0; step < 20; ++step) {
        for (const auto& parameter : model->parameters()) at::Tensor(parameter).mutable_grad().reset();
        mean_loss(parallel.forward(batch(group().rank(), step))).backward();
        simulation.step(step);
        ASSERT_LT(difference(model->parameters(), simulation.model(group().rank())->parameters()), 1e-11)
            << name << " step " << step;
      }
      EXPECT_GT(parallel.buckets().size(), 1);
      EXPECT_EQ(parallel.statistics().skipped + parallel.statistics().newer + parallel.statistics().older, 0);
    }
  }
}

}  // namespace
}  // namespace shoal
