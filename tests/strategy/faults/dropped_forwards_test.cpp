// BEY10: forwards and wrappers that are dropped without a backward.

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <torch/autograd.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include "shoal/call_log.h"
#include "tests/strategy/faults/faulty_training.h"
#include "tests/support/refusal.h"
#include "tests/support/training.h"
#include "tests/support/world.h"

namespace shoal::dropped_forwards_test {
namespace {

using test::batch;
using test::difference;
using test::group;
using namespace faults;  // NOLINT(google-build-using-namespace): helpers of this folder's tests

TEST_P(Faults, BEY10_an_evaluation_in_a_hook_of_backward_changes_nothing) {
  Trainer trainer(GetParam());
  trainer.step(0);
  trainer.model->second->weight.register_hook([&](const at::Tensor&) {
    const torch::NoGradGuard no_grad;
    trainer.training.forward(batch(group().rank(), 10));
  });
  for (const int64_t step : {1, 2}) trainer.step(step);
  EXPECT_LT(difference(trainer.model->parameters(), reference({0, 1, 2})), 1e-12);
}

TEST_P(Faults, BEY10_ranks_that_are_a_step_apart_are_refused) {
  if (GetParam().starts_with("megatron")) GTEST_SKIP() << "DistributedOptimizer sees no forward";
  if (group().size() == 1) GTEST_SKIP() << "needs other ranks";
  if (gathers(GetParam())) GTEST_SKIP() << "its gathers notice it first";
  Trainer trainer(GetParam());
  trainer.step(0);
  trainer.training.zero_grad();
  const int behind = group().size() - 1;
  if (group().rank() == behind) trainer.training.forward(batch(behind, 10));  // as if its loss had thrown
  const auto expect_refusal = [&](int64_t step) {
    const auto text = test::refusal([&] { trainer.step(step); });
    EXPECT_THAT(text, testing::AllOf(testing::HasSubstr(fmt::format("rank {} ran a forward whose result", behind)),
                                     testing::HasSubstr("may have met"), testing::HasSubstr("NoGradGuard"),
                                     testing::HasSubstr("call abandon_step()")));
  };
  expect_refusal(11);
  expect_refusal(12);  // without communication: the ranks stay apart
}

// As programs do on rank 0 that forget NoGradGuard.
TEST_P(Faults, BEY10_an_evaluation_on_one_rank_needs_no_backward) {
  Trainer trainer(GetParam());
  for (const int64_t step : {0, 1, 2}) trainer.step(step);
  trainer.model->eval();
  if (group().rank() == 0 && !gathers(GetParam())) trainer.training.forward(batch(0, 10));
  trainer.model->train();
  trainer.step(3);
  EXPECT_LT(difference(trainer.model->parameters(), reference({0, 1, 2, 3})), 1e-12);
}

TEST_P(Faults, BEY10_forwards_that_all_ranks_drop_or_use_in_different_numbers_are_right) {
  Trainer trainer(GetParam());
  trainer.step(0);
  for (int again = 0; again < 70; ++again) trainer.training.forward(batch(group().rank(), 10));
  trainer.step(1);
  trainer.training.zero_grad();
  const int parts = gathers(GetParam()) ? 2 : group().rank() + 1;
  at::Tensor sum;
  for (int part = 0; part < parts; ++part) {
    const auto loss = trainer.training.forward(batch(group().rank(), 2)) / parts;
    sum = part == 0 ? loss : sum + loss;
  }
  sum.backward();
  trainer.training.step();
  EXPECT_LT(difference(trainer.model->parameters(), reference({0, 1, 2})), 1e-12);
}

TEST_P(Faults, dropping_a_strategy_removes_its_hooks) {
  const bool pairs = GetParam().starts_with("fsdp_hybrid") && group().size() % 2 == 0;
  const bool pages = group().size() > 1 && group().transport() != "host" &&
                     (GetParam() == "fsdp" || GetParam() == "fsdp_grad_op" || pairs);
  if (pages) GTEST_SKIP() << "the parameters of a wrapper that has gone are on all ranks in parts";
  auto model = (torch::manual_seed(1), std::make_shared<FaultyImpl>());
  auto log = std::make_shared<CallLog>();
  const auto make = [&](const Group& on) {
    return test::Training<FaultyImpl>::make<torch::optim::SGD>(GetParam(), model, on, torch::optim::SGDOptions(0.1));
  };
  make(group().recorded(log));
  log->clear();
  model->forward(batch(0, 0)).backward();
  EXPECT_EQ(log->records().size(), 0U);
  auto again = make(group());
  again.zero_grad();
  model->zero_grad();
  again.forward(batch(group().rank(), 0)).backward();
  again.step();
}

TEST_P(Faults, BEY10_a_backward_whose_wrapper_is_gone_is_refused) {
  if (GetParam().starts_with("megatron")) GTEST_SKIP() << "DistributedOptimizer sees no forward";
  if (gathers(GetParam())) GTEST_SKIP() << "the parameters of a wrapper that has gone are on all ranks in parts";
  const auto x = batch(group().rank(), 0).requires_grad_();
  const auto loss = Trainer(GetParam()).training.forward(x);
  EXPECT_TRUE(torch::autograd::grad({loss}, {x}, {}, /*retain_graph=*/true).front().defined());
  const auto text = test::refusal([&] { loss.backward(); });
  EXPECT_THAT(text, testing::AllOf(testing::HasSubstr("wrapper is gone by now"), testing::HasSubstr("first.weight"),
                                   testing::HasSubstr("Keep the wrapper")));
}

}  // namespace
}  // namespace shoal::dropped_forwards_test
