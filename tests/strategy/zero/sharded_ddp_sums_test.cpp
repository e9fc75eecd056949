// ShardedDataParallel with gradients that are there already: left by no_sync, set by hand, summed by earlier steps, and
// state and gradients after a change of dtype.

#include <gtest/gtest.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

#include "shoal/optim.h"
#include "tests/strategy/zero/sharded_ddp_training.h"

namespace shoal::test::sharded_ddp_sums_test {
namespace {

using Adam = OSS<torch::optim::Adam>;

// Only what owners have is compared.
void expect_own_gradients(const Mlp& model, const OSSCore& optimizer, const std::vector<at::Tensor>& want) {
  for (size_t i = 0; i < model->parameters().size(); ++i) {
    const auto parameter = model->parameters()[i];
    if (optimizer.param_to_rank(parameter) != group().rank()) continue;
    EXPECT_LT(difference({parameter.grad()}, {want[i]}), 1e-12) << i;
  }
}

TEST(ShardedDdp, SDP10_reduce_sums_up_what_no_sync_has_left) {
  auto model = seeded(1);
  Reference reference(seeded(1));
  Sgd optimizer(model->parameters(), sgd, group());
  ShardedDataParallel parallel(model, optimizer, group());
  for (int64_t number = 0; number < 4; ++number) {
    {
      const auto scope = parallel.no_sync();
      mean_loss(parallel.forward(batch(group().rank(), number))).backward();
      if (number == 2) parallel.reduce();
    }
    if (number != 2) parallel.reduce();
    parallel.reduce();  // nothing is left
    optimizer.step();
    optimizer.zero_grad();
    reference.step(number);
  }
  EXPECT_LT(difference(model->parameters(), reference.model()->parameters()), 1e-12);
}

TEST(ShardedDdp, SDP10_reduce_sums_up_gradients_that_were_set_by_hand_and_adds_to_sums) {
  auto model = seeded(1);
  auto reference = seeded(1);
  Sgd optimizer(model->parameters(), sgd, group());
  ShardedDataParallel parallel(model, optimizer, group());
  std::vector<at::Tensor> want;
  for (auto& parameter : model->parameters()) {
    parameter.mutable_grad() = at::full_like(parameter, group().rank() + 1.0).detach();
    want.push_back(at::full_like(parameter, (group().size() + 1) / 2.0));
  }
  parallel.reduce();
  expect_own_gradients(model, optimizer, want);
  {
    const auto scope = parallel.no_sync();
    mean_loss(parallel.forward(batch(group().rank(), 0))).backward();
  }
  parallel.reduce();
  for (int rank = 0; rank < group().size(); ++rank) {
    (mean_loss(reference->forward(batch(rank, 0))) / group().size()).backward();
  }
  for (size_t i = 0; i < want.size(); ++i) want[i] = want[i] + reference->parameters()[i].grad();
  expect_own_gradients(model, optimizer, want);
}

// Sums that are there when a parameter gets another owner go along, and are not added up again.
TEST(ShardedDdp, SDP06_sums_of_earlier_steps_move_with_their_parameters) {
  auto model = seeded(1);
  auto reference = seeded(1);
  Adam optimizer(model->parameters(), torch::optim::AdamOptions(1e-2), group());
  torch::optim::Adam whole(reference->parameters(), torch::optim::AdamOptions(1e-2));
  ShardedDataParallel parallel(model, optimizer, group());
  for (int64_t number = 0; number < 4; ++number) {
    const auto named = model->named_parameters();
    for (auto* of : {&model, &reference}) {
      for (auto& item : (*of)->named_parameters()) {  // rank 0's share, and what is left of the others'
        item.value().requires_grad_(number % 2 == 0 || optimizer.param_to_rank(named[item.key()]) != 0 ||
                                    group().size() == 1);
      }
    }
    parallel.refresh_trainable();
    mean_loss(parallel.forward(batch(group().rank(), number))).backward();
    for (int rank = 0; rank < group().size(); ++rank) {
      (mean_loss(reference->forward(batch(rank, number))) / group().size()).backward();
    }
    std::vector<at::Tensor> want;
    for (const auto& parameter : reference->parameters()) want.push_back(parameter.grad());
    expect_own_gradients(model, optimizer, want);
    optimizer.step();
    whole.step();
  }
  EXPECT_LT(difference(model->parameters(), reference->parameters()), 1e-12);
}

TEST(ShardedDdp, SDP11_zero_grad_in_place_and_a_change_of_dtype_keep_training_right) {
  auto model = seeded(1);
  Reference reference(seeded(1));
  Sgd optimizer(model->parameters(), sgd, group());
  ShardedDataParallel parallel(model, optimizer, group());
  for (int64_t number = 0; number < 3; ++number) {
    mean_loss(parallel.forward(batch(group().rank(), number))).backward();
    optimizer.step();
    optimizer.zero_grad(/*set_to_none=*/false);
    reference.step(number);
  }
  EXPECT_LT(difference(model->parameters(), reference.model()->parameters()), 1e-12);
  optimizer.zero_grad();
  model->to(at::kFloat);
  const auto before = model->first->weight.detach().clone();
  mean_loss(parallel.forward(batch(group().rank(), 3).to(at::kFloat))).backward();
  for (const auto& parameter : optimizer.local_params()) EXPECT_EQ(parameter.grad().scalar_type(), at::kFloat);
  EXPECT_EQ(model->first->weight.scalar_type(), at::kFloat);
}

// Every optimizer's state goes on after the parameters' dtype has changed; fused ones convert it.
template <class Optimizer, class Defaults>
void expect_training_after_a_change_of_dtype(const Defaults& defaults) {
  torch::manual_seed(1);
  Mlp model(12, 16, 5, at::kFloat);
  torch::manual_seed(1);
  Mlp reference(12, 16, 5, at::kFloat);
  OSS<Optimizer> optimizer(model->parameters(), defaults, group());
  ShardedDataParallel parallel(model, optimizer, group());
  Optimizer whole(reference->parameters(), defaults);
  for (int64_t number = 0; number < 6; ++number) {
    const auto dtype = number < 3 ? at::kFloat : at::kDouble;
    for (auto* of : {&model, &reference}) {
      if (number == 3) (*of)->to(dtype);
    }
    mean_loss(parallel.forward(batch(group().rank(), number).to(dtype))).backward();
    optimizer.step();
    optimizer.zero_grad();
    for (int rank = 0; rank < group().size(); ++rank) {
      (mean_loss(reference->forward(batch(rank, number).to(dtype))) / group().size()).backward();
    }
    whole.step();
    whole.zero_grad();
  }
  EXPECT_LT(difference(model->parameters(), reference->parameters()), 1e-4);
  for (const auto& parameter : model->parameters()) EXPECT_EQ(parameter.scalar_type(), at::kDouble);
}

TEST(ShardedDdp, SDP11_training_goes_on_after_a_change_of_dtype_with_every_optimizer) {
  expect_training_after_a_change_of_dtype<torch::optim::SGD>(sgd);
  expect_training_after_a_change_of_dtype<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-3));
  expect_training_after_a_change_of_dtype<FusedSGD>(sgd);
  expect_training_after_a_change_of_dtype<FusedAdam>(torch::optim::AdamOptions(1e-3));
  expect_training_after_a_change_of_dtype<FusedAdamW>(torch::optim::AdamWOptions(1e-3));
  expect_training_after_a_change_of_dtype<FusedAdagrad>(torch::optim::AdagradOptions(1e-3));
}

}  // namespace
}  // namespace shoal::test::sharded_ddp_sums_test
