// DistributedDataParallel: gradients weighted by tokens or samples (BEY04).
#include "shoal/ddp.h"

#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <stdexcept>

#include "shoal/error.h"
#include "tests/support/models.h"
#include "tests/support/world.h"

namespace shoal::ddp_weight_test {
namespace {

using test::batch;
using test::difference;
using test::group;
using test::mean_loss;
using test::seeded;

TEST(DdpWeight, BEY04_weighted_backward_gives_sum_over_sum) {
  // Rank r sums over r + 1 samples in two micro-batches; the mean of means would differ.
  for (const bool view : {true, false}) {
    auto model = seeded(1);
    auto reference = seeded(1);
    DistributedDataParallel parallel(model, group(), {.gradient_as_bucket_view = view});
    for (int64_t step = 0; step < 3; ++step) {
      model->zero_grad();
      const auto samples = group().rank() + 1;
      {
        const auto local = parallel.no_sync();
        parallel.backward(parallel.forward(batch(group().rank(), step, 0, samples)).pow(2).sum(), samples);
      }
      parallel.backward(parallel.forward(batch(group().rank(), step, 1, 2)).pow(2).sum(), 2);
    }
    double weight = 0;
    for (int rank = 0; rank < group().size(); ++rank) {
      reference->forward(batch(rank, 2, 0, rank + 1)).pow(2).sum().backward();
      reference->forward(batch(rank, 2, 1, 2)).pow(2).sum().backward();
      weight += rank + 3;
    }
    for (auto& parameter : reference->parameters()) parameter.mutable_grad().div_(weight);
    EXPECT_LT(difference(test::gradients(*model), test::gradients(*reference)), 1e-12);
  }
}

TEST(DdpWeight, BEY04_losses_over_five_tokens_and_one_token) {
  if (group().size() != 2) GTEST_SKIP() << "the row's own example has two ranks";
  auto model = std::make_shared<torch::nn::LinearImpl>(torch::nn::LinearOptions(1, 1).bias(false));
  DistributedDataParallel parallel(model, group());
  // Gradients of 1 for each of rank 0's five tokens, 3 for rank 1's only one: (5 * 1 + 3) / 6, not (1 + 3) / 2.
  const int tokens = group().rank() == 0 ? 5 : 1;
  const auto x = at::full({tokens, 1}, group().rank() == 0 ? 1.0 : 3.0);
  parallel.backward(parallel.forward(x).sum(), tokens);
  EXPECT_NEAR(model->weight.grad().item<double>(), 1.3333333, 1e-6);
}

TEST(DdpWeight, BEY04_a_rank_without_samples_takes_part_with_weight_0) {
  auto model = seeded(1);
  auto reference = seeded(1);
  DistributedDataParallel parallel(model, group());
  const bool has = group().rank() == 0;
  parallel.backward(has ? parallel.forward(batch(0, 0)).sum() : (parallel.forward(batch(0, 0)), at::Tensor()),
                    has ? 4 : 0);
  (reference->forward(batch(0, 0)).sum() / 4).backward();
  EXPECT_LT(difference(test::gradients(*model), test::gradients(*reference)), 1e-12);
}

TEST(DdpWeight, BEY04_refuses_wrong_weights_and_mixtures) {
  auto model = seeded(1);
  DistributedDataParallel parallel(model, group());
  const auto loss = [&] { return parallel.forward(batch(group().rank(), 0)).sum(); };
  EXPECT_THROW(parallel.backward(loss(), -1), UsageError);
  EXPECT_THROW(parallel.backward(loss(), NAN), UsageError);
  {
    const auto local = parallel.no_sync();
    parallel.backward(loss(), 4);
  }
  EXPECT_THROW(loss().backward(), UsageError);
  parallel.abandon_step();
  model->zero_grad();
  parallel.backward(loss(), 4);
}

TEST(DdpWeight, BEY04_a_zeroed_micro_batch_that_gave_zeros_on_a_rank_has_no_weight) {
  auto model = std::make_shared<torch::nn::LinearImpl>(torch::nn::LinearOptions(2, 1).bias(false));
  DistributedDataParallel parallel(model, group());
  {
    const auto local = parallel.no_sync();
    parallel.backward(parallel.forward(at::full({2, 2}, 1.0 * group().rank())).sum(), 2);
  }
  model->zero_grad(/*set_to_none=*/false);
  parallel.backward(parallel.forward(at::ones({2, 2})).sum(), 2);
  EXPECT_LT(difference({model->weight.grad()}, {at::ones({1, 2})}), 1e-6);
}

TEST(DdpWeight, BEY04_what_a_rank_adds_to_zeroed_means_is_its_own) {
  auto model = seeded(1);
  DistributedDataParallel parallel(model, group());
  for (int64_t step = 0; step < 2; ++step) {
    parallel.backward(parallel.forward(batch(group().rank(), step)).pow(2).sum(), 4);
    if (step == 1) break;
    model->zero_grad(/*set_to_none=*/false);
    for (auto& parameter : model->parameters()) parameter.mutable_grad().add_(group().rank());
  }
  const double added = group().size() * (group().size() - 1) / 2.0;  // by all ranks
  auto reference = seeded(1);
  for (int rank = 0; rank < group().size(); ++rank) {
    (reference->forward(batch(rank, 1)).pow(2).sum() / (4 * group().size())).backward();
  }
  for (auto& parameter : reference->parameters()) parameter.mutable_grad().add_(added / (4 * group().size()));
  EXPECT_LT(difference(test::gradients(*model), test::gradients(*reference)), 1e-12);
}

TEST(DdpWeight, BEY04_a_micro_batch_that_fails_has_no_weight) {
  auto model = seeded(1);
  DistributedDataParallel parallel(model, group());
  {
    const auto local = parallel.no_sync();
    const auto output = parallel.forward(batch(group().rank(), 1));
    output.register_hook([](const at::Tensor&) { throw std::runtime_error("a bad batch"); });
    EXPECT_ANY_THROW(parallel.backward(output.pow(2).sum(), 4));
  }
  parallel.backward(parallel.forward(batch(group().rank(), 0)).pow(2).sum(), 4);
  auto reference = seeded(1);
  for (int rank = 0; rank < group().size(); ++rank) {
    (reference->forward(batch(rank, 0)).pow(2).sum() / (4 * group().size())).backward();
  }
  EXPECT_LT(difference(test::gradients(*model), test::gradients(*reference)), 1e-12);
}

}  // namespace
}  // namespace shoal::ddp_weight_test
