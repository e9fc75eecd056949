// DecentralizedDataParallel compared with a dense simulation of all ranks in one process (rows DEC01 to DEC16).

#include "shoal/decentralized.h"

#include <torch/optim/sgd.h>
#include <torch/types.h>

#include "tests/strategy/decentralized/decentralized_simulation.h"
#include "tests/support/models.h"
#include "tests/support/world.h"

namespace shoal::decentralized_test {
namespace {

using test::batch;
using test::difference;
using test::group;
using test::mean_loss;
using test::seeded;
using test::Simulation;
using Options = DecentralizedDataParallelOptions;

const torch::optim::SGDOptions sgd = torch::optim::SGDOptions(0.1).momentum(0.9);

std::vector<std::string> names() {
  return {"complete", "ring", "one-peer-exp", "alternating-exp-ring", "exp", "torus", "hypercube", "star", "random"};
}

TEST(Decentralized, DEC05_DEC01_every_topology_equals_a_dense_simulation_in_both_layouts) {
  for (const auto& name : names()) {
    for (const bool views : {true, false}) {
      const auto topology = make_topology(name, group().size(), 1, 7);
      Simulation<test::MlpImpl> simulation(
          topology, [] { return seeded(1).ptr(); }, sgd);
      auto model = seeded(1);
      DecentralizedDataParallel parallel(
          model, optimizer_recipe<torch::optim::SGD>(sgd), group(),
          Options{.topology = topology, .bucket_cap_mb = 0.001, .param_as_bucket_view = views});
      for (int64_t step = 0; step < 10; ++step) {
        for (const auto& parameter : model->parameters()) at::Tensor(parameter).mutable_grad().reset();
        mean_loss(parallel.forward(batch(group().rank(), step))).backward();
        simulation.step([&](test::MlpImpl& of, int rank) { return mean_loss(of.forward(batch(rank, step))); });
        ASSERT_LT(difference(model->parameters(), simulation.model(group().rank()).parameters()), 1e-11)
            << name << " step " << step;
      }
      EXPECT_GT(parallel.buckets().size(), 1);
      EXPECT_EQ(parallel.statistics().skipped + parallel.statistics().newer + parallel.statistics().older, 0);
    }
  }
}

TEST(Decentralized, DEC03_buckets_are_aligned_and_updated_inside_backward) {
  auto model = seeded(1);
  const auto topology = make_topology("ring", group().size());
  DecentralizedDataParallel parallel(model, optimizer_recipe<torch::optim::SGD>(sgd), group(),
                                     Options{.topology = topology, .bucket_cap_mb = 0.001});
  const auto forward = [&](int64_t step) { return mean_loss(parallel.forward(batch(group().rank(), step))); };
  forward(0).backward();  // buckets are made at its end
  ASSERT_EQ(parallel.optimizers().size(), parallel.buckets().size());
  const auto parameters = model->named_parameters();
  for (const auto& bucket : parallel.buckets()) {
    constexpr uintptr_t alignment = 128;
    auto next = reinterpret_cast<uintptr_t>(parameters[bucket.front()].data_ptr());
    for (const auto& name : bucket) {
      EXPECT_EQ(reinterpret_cast<uintptr_t>(parameters[name].data_ptr()), next)
          << name << " is not behind the last one";
      EXPECT_EQ(next % alignment, 0) << name;
      next += (parameters[name].nbytes() + alignment - 1) / alignment * alignment;
    }
  }
  const auto before = model->third->weight.detach().clone();
  bool updated = false;
  model->first->weight.register_hook([&](const at::Tensor&) { updated = !at::equal(model->third->weight, before); });
  forward(1).backward();
  EXPECT_TRUE(updated) << "the last layer, when the first one's gradient comes";
}

}  // namespace
}  // namespace shoal::decentralized_test
