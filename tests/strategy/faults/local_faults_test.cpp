// BEY10: an exception in steps without collectives.

#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include "shoal/local_updates.h"
#include "tests/strategy/faults/faulty_training.h"
#include "tests/support/models.h"
#include "tests/support/world.h"

namespace shoal::local_faults_test {
namespace {

using test::batch;
using test::difference;
using test::group;
using namespace faults;  // NOLINT(google-build-using-namespace): helpers of this folder's tests

// Steps without collectives: the failing rank still takes part in exchanges, with its present values.
TEST(LocalFaults, BEY10_local_updates_count_a_step_that_failed_on_a_rank) {
  for (const auto point : {Point::forward, Point::first_gradient, Point::last_gradient}) {
    const auto make = [] { return (torch::manual_seed(1), std::make_shared<FaultyImpl>()); };
    const auto options = torch::optim::SGDOptions(0.1).momentum(0.9);
    auto model = make();
    torch::optim::SGD optimizer(model->parameters(), options);
    LocalUpdates local(std::static_pointer_cast<torch::nn::Module>(model), optimizer, group(), {.every = 2});
    std::vector<std::shared_ptr<FaultyImpl>> simulated;
    std::vector<std::unique_ptr<torch::optim::SGD>> optimizers;
    for (int rank = 0; rank < group().size(); ++rank) {
      simulated.push_back(make());
      optimizers.push_back(std::make_unique<torch::optim::SGD>(simulated.back()->parameters(), options));
    }
    for (int64_t step = 0; step < 6; ++step) {
      const auto fails = [&](int rank) { return rank == 0 && step == 2; };
      if (fails(group().rank())) model->fail = point;
      bool good = true;
      try {
        model->forward(batch(group().rank(), step)).backward();
      } catch (const Injected&) {
        good = false;
      }
      EXPECT_EQ(good, !fails(group().rank()));
      model->fail.reset();
      local.step(good);
      local.zero_grad();
      for (int rank = 0; rank < group().size(); ++rank) {
        if (fails(rank)) continue;
        optimizers[rank]->zero_grad();
        simulated[rank]->forward(batch(rank, step)).backward();
        optimizers[rank]->step();
      }
      const torch::NoGradGuard no_grad;
      for (size_t i = 0; step % 2 == 1 && i < model->parameters().size(); ++i) {
        auto mean = at::zeros_like(model->parameters()[i]);
        for (const auto& one : simulated) mean += one->parameters()[i] / group().size();
        for (const auto& one : simulated) one->parameters()[i].copy_(mean);
      }
      ASSERT_LT(difference(model->parameters(), simulated[group().rank()]->parameters()), 1e-12) << "step " << step;
    }
  }
}

}  // namespace
}  // namespace shoal::local_faults_test
