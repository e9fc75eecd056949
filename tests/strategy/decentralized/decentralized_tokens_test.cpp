// DecentralizedDataParallel with a weight per backward.

#include <torch/optim/sgd.h>
#include <torch/types.h>

#include "shoal/error.h"
#include "tests/strategy/decentralized/decentralized_ring.h"

namespace shoal::decentralized_tokens_test {
namespace {

using namespace test;  // NOLINT(google-build-using-namespace): helpers of this folder's tests
using Options = DecentralizedDataParallelOptions;

// Gradients are divided by the mean of the ranks' weights.
TEST(Decentralized, BEY04_weights_make_the_mean_over_uneven_micro_batches_exact) {
  auto simulation = simulated();
  auto model = seeded(1);
  double mean_weight = 0;
  for (int rank = 0; rank < group().size(); ++rank) mean_weight += (6.0 + rank) / group().size();
  DecentralizedDataParallel parallel(model, plain(), group(), {.topology = ring(), .bucket_cap_mb = small_bucket});
  for (int64_t step = 0; step < 4; ++step) {
    const std::vector<int64_t> samples{5, 1 + me()};
    for (int64_t micro = 0; micro < 2; ++micro) {
      const auto scope = parallel.no_sync(micro == 0);
      const auto output = parallel.forward(batch(me(), step, micro, samples[micro]));
      parallel.backward(output.pow(2).sum(), static_cast<double>(samples[micro]));
    }
    simulation.step([&](MlpImpl& of, int rank) {
      return (of.forward(batch(rank, step, 0, 5)).pow(2).sum() +
              of.forward(batch(rank, step, 1, 1 + rank)).pow(2).sum()) /
             mean_weight;
    });
    expect_equal(model, simulation);
  }
  // A rank without samples still mixes.
  if (me() == 0) {
    parallel.backward({}, 0);
  } else {
    parallel.backward(parallel.forward(batch(me(), 9)).pow(2).sum(), 4);
  }
  simulation.step([&](MlpImpl& of, int rank) {
    return rank == 0 ? at::Tensor() : of.forward(batch(rank, 9)).pow(2).sum() / mean_weight;
  });
  expect_equal(model, simulation);
  EXPECT_THROW(parallel.backward({}, 1), UsageError);
  EXPECT_THROW(parallel.backward({}, -1), UsageError);
}

// Its gradient is the slope, at any position.
struct SlideImpl : torch::nn::Module {
  SlideImpl() { place = register_parameter("place", at::zeros({3}, at::kDouble)); }
  at::Tensor forward(double slope) { return slope * place.sum(); }
  at::Tensor place;
};

TEST(Decentralized, BEY04_five_tokens_and_one_give_their_common_mean_in_every_topology) {
  const auto tokens = [](int rank) { return rank == 0 ? 5.0 : 1.0; };
  const auto loss_sum = [](int rank) { return rank == 0 ? 5.0 : 3.0; };  // 1 per token, and 3
  double sum = 0;
  double weight = 0;
  for (int rank = 0; rank < group().size(); ++rank) {
    sum += loss_sum(rank);
    weight += tokens(rank);
  }
  const auto sgd = optimizer_recipe<torch::optim::SGD>(torch::optim::SGDOptions(0.5));
  std::vector<Options> all;
  for (const auto* name : {"ring", "complete", "one-peer-exp", "exp"}) {
    all.push_back({.topology = make_topology(name, group().size())});
  }
  all.push_back({.topology = ring(), .clip_grad = 1e6, .param_as_bucket_view = false});
  all.push_back({.topology = ring(), .scaler = GradScalerOptions{.initial_scale = 8}});
  all.push_back({.topology = ring(), .compressed_exchange = CompressedExchange{.rate = 0.5}});
  for (size_t i = 0; i < all.size(); ++i) {
    auto model = std::make_shared<SlideImpl>();
    DecentralizedDataParallel<SlideImpl> parallel(model, sgd, group(), all[i]);
    for (int step = 1; step <= 5; ++step) {
      parallel.backward(parallel.scale_loss(parallel.forward(loss_sum(me()))), tokens(me()));
      auto mean = model->place.detach().clone();
      group().all_reduce(mean, ReduceOp::avg).wait();
      EXPECT_NEAR(mean[0].item<double>(), -0.5 * step * sum / weight, 1e-9) << "case " << i << " step " << step;
    }
    parallel.global_avg();
    EXPECT_NEAR(model->place[1].item<double>(), -2.5 * sum / weight, 1e-9) << i;
  }
}

TEST(Decentralized, BEY04_tokens_weigh_the_same_on_all_ranks_when_weights_change_places) {
  if (group().size() == 1) GTEST_SKIP() << "nobody to change places with";
  auto model = std::make_shared<SlideImpl>();
  DecentralizedDataParallel<SlideImpl> parallel(model, optimizer_recipe<torch::optim::SGD>(torch::optim::SGDOptions(1)),
                                                group(), {.topology = make_topology("complete", group().size())});
  const double total = 5.0 + (group().size() - 1);
  for (int64_t step = 0; step < 8; ++step) {
    const bool many = me() == step % group().size();
    parallel.backward(parallel.forward(many ? 5 : 3), many ? 5 : 1);
  }
  parallel.global_avg();
  EXPECT_NEAR(model->place[0].item<double>(), -8 * (5 + 3 * (group().size() - 1.0)) / total, 1e-9);
}

TEST(Decentralized, BEY04_weights_on_some_ranks_only_are_refused) {
  auto model = seeded(1);
  DecentralizedDataParallel parallel(model, plain(), group(), {.topology = ring()});
  if (group().size() > 1) {
    const auto sum = [&] { return parallel.forward(batch(me(), 0)).pow(2).sum(); };
    EXPECT_THROW(me() == 0 ? parallel.backward(sum(), 4) : sum().backward(), DisagreeError);
    parallel.abandon_step();
    EXPECT_EQ(difference(model->parameters(), seeded(1)->parameters()), 0);
  }
  {
    const auto scope = parallel.no_sync();
    parallel.backward(parallel.forward(batch(me(), 0)).pow(2).sum(), 4);
    EXPECT_THROW(parallel.forward(batch(me(), 0)).pow(2).mean().backward(), UsageError);
  }
}

}  // namespace
}  // namespace shoal::decentralized_tokens_test
