// BEY10: what a loop may do once a step has failed: abandon it, run its backward again, zero gradients.

#include <fmt/format.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <numeric>
#include <thread>

#include "shoal/error.h"
#include "tests/strategy/faults/faulty_training.h"
#include "tests/support/refusal.h"
#include "tests/support/world.h"

namespace shoal::abandoned_steps_test {
namespace {

using test::batch;
using test::difference;
using test::group;
using namespace faults;  // NOLINT(google-build-using-namespace): helpers of this folder's tests

TEST_P(Faults, BEY10_a_backward_after_one_that_failed_is_refused_until_the_step_is_abandoned) {
  if (GetParam() == "megatron_no_overlap") GTEST_SKIP() << "its backwards are local: they only add to grad()";
  Trainer trainer(GetParam());
  trainer.step(0);
  trainer.training.zero_grad();
  trainer.model->fail = Point::last_gradient;
  const auto loss = trainer.training.forward(batch(group().rank(), 10));
  EXPECT_THROW(loss.backward({}, /*keep_graph=*/true), Injected);
  trainer.model->fail.reset();
  const auto text = test::refusal([&] { loss.backward(); });
  EXPECT_NE(text.find("the last backward failed in the middle of a step"), std::string::npos) << text;
  trainer.training.abandon_step();
  trainer.step(1);
  EXPECT_LT(difference(trainer.model->parameters(), reference({0, 1})), 1e-12);
}

TEST_P(Faults, BEY10_a_backward_that_failed_before_its_first_gradient_may_be_run_again) {
  Trainer trainer(GetParam());
  trainer.step(0);
  trainer.training.zero_grad();
  const bool here = group().rank() == 0;
  if (here) trainer.model->fail = Point::before_gradients;
  const auto loss = trainer.training.forward(batch(group().rank(), 1));
  if (here) EXPECT_THROW(loss.backward({}, /*keep_graph=*/true), Injected);
  trainer.model->fail.reset();
  loss.backward();
  trainer.training.step();
  trainer.step(2);
  EXPECT_LT(difference(trainer.model->parameters(), reference({0, 1, 2})), 1e-12);
}

// As in a pool of threads, whose exceptions the main thread handles.
TEST_P(Faults, BEY10_a_step_that_failed_in_another_thread_may_be_abandoned_in_this_one) {
  if (GetParam().starts_with("megatron")) GTEST_SKIP() << "DistributedOptimizer sees no forward";
  Trainer trainer(GetParam());
  trainer.step(0);
  trainer.training.zero_grad();
  const bool here = group().rank() == 0;
  if (here) trainer.model->fail = Point::last_gradient;
  bool injected = false, abandoned = false;
  std::thread([&] {
    try {
      trainer.training.forward(batch(group().rank(), 10)).backward();
    } catch (const Injected&) {
      injected = true;
    } catch (const StepAbandoned&) {
      abandoned = true;
    }
  }).join();
  EXPECT_EQ(injected, here);
  EXPECT_EQ(abandoned, !here);
  trainer.model->fail.reset();
  if (here) trainer.training.abandon_step();
  trainer.step(1);
  EXPECT_LT(difference(trainer.model->parameters(), reference({0, 1})), 1e-12);
}

// A second backward through a step's graph, as where a program looks at gradients once more.
TEST_P(Faults, BEY10_a_backward_that_failed_before_its_first_gradient_between_steps_does_not_end_the_next_step) {
  if (GetParam().starts_with("megatron")) GTEST_SKIP() << "DistributedOptimizer sees no forward";
  if (gathers(GetParam())) GTEST_SKIP() << "all ranks must run as many backwards";
  Trainer trainer(GetParam());
  trainer.model->fail = Point::before_gradients;  // sets the hook
  const auto again = trainer.training.forward(batch(group().rank(), 0));
  trainer.model->fail.reset();
  again.backward({}, /*keep_graph=*/true);
  trainer.training.step();
  trainer.training.zero_grad();
  if (group().rank() == 0) {
    trainer.model->fail = Point::before_gradients;
    EXPECT_THROW(again.backward(), Injected);
    trainer.model->fail.reset();
  }
  const auto loss = trainer.training.forward(batch(group().rank(), 1));
  {
    const torch::NoGradGuard no_grad;
    trainer.training.forward(batch(group().rank(), 10));
  }
  loss.backward();
  trainer.training.step();
  EXPECT_LT(difference(trainer.model->parameters(), reference({0, 1})), 1e-12);
}

TEST_P(Faults, BEY10_an_exception_in_the_loss_ends_the_step_on_all_where_abandon_step_is_called) {
  for (const int faulty : {0, group().size() - 1}) {
    Trainer trainer(GetParam());
    trainer.step(0);
    trainer.training.zero_grad();
    auto output = trainer.training.forward(batch(group().rank(), 10));
    if (group().rank() == faulty) {
      output.reset();
      trainer.training.abandon_step();
    } else {
      const auto rest = [&] {
        output.backward();
        trainer.training.step();
      };
      EXPECT_THROW(rest(), StepAbandoned);
    }
    trainer.step(1);
    EXPECT_LT(difference(trainer.model->parameters(), reference({0, 1})), 1e-12);
  }
}

// As programs do that skip a bad batch: in one handler on all ranks.
TEST_P(Faults, BEY10_all_ranks_may_call_abandon_step_in_one_handler) {
  Trainer trainer(GetParam());
  int abandoned = 0;
  for (int64_t step = 0; step < 6; ++step) {
    try {
      trainer.training.zero_grad();
      auto output = trainer.training.forward(batch(group().rank(), step));
      if (step == 2 && group().rank() == group().size() - 1) {
        output.reset();
        throw Injected();
      }
      output.backward();
      trainer.training.step();
    } catch (const std::exception&) {
      ++abandoned;
      trainer.training.abandon_step();
    }
  }
  EXPECT_EQ(abandoned, 1);
  EXPECT_LT(difference(trainer.model->parameters(), reference({0, 1, 3, 4, 5})), 1e-12);
}

// A step leaves sums, the next one fails, and zero_grad() follows, in either form. Where the failing rank says so
// first, which OSS needs before its step(), the loop goes on to step(): with zeros, momentum moves the parameters, on
// all ranks alike.
void zero_after_a_failure(const std::string& strategy, Point point, const std::vector<int>& faulty, bool says_so,
                          bool to_none) {
  SCOPED_TRACE(
      fmt::format("point {}, {} ranks, said {}, to none {}", static_cast<int>(point), faulty.size(), says_so, to_none));
  const bool here = std::count(faulty.begin(), faulty.end(), group().rank()) > 0;
  const bool updates = says_so || strategy == "ddp" || strategy == "fsdp";
  Trainer trainer(strategy);
  trainer.step(0);
  if (here) trainer.model->fail = point;
  EXPECT_ANY_THROW(trainer.training.forward(batch(group().rank(), 10)).backward());
  trainer.model->fail.reset();
  if (here && (says_so || strategy.starts_with("megatron"))) trainer.training.abandon_step();
  trainer.training.optimizer().zero_grad(to_none);
  if (updates) trainer.training.step();
  trainer.training.forward(batch(group().rank(), 1)).backward();
  trainer.training.step();

  torch::manual_seed(1);
  FaultyImpl model;
  torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (const int64_t step : {0, 1}) {
    for (int rank = 0; rank < group().size(); ++rank) (model.forward(batch(rank, step)) / group().size()).backward();
    optimizer.step();
    if (step == 0) optimizer.zero_grad(to_none);
    if (step == 0 && updates) optimizer.step();
  }
  EXPECT_LT(difference(trainer.model->parameters(), model.parameters()), 1e-12);
}

TEST_P(Faults, BEY10_zero_grad_after_a_failed_step_holds_for_what_was_before_it) {
  if (GetParam() == "megatron_no_overlap") GTEST_SKIP() << "other ranks do not hear of it before step()";
  if (GetParam() == "megatron_in_grads")
    GTEST_SKIP() << "nothing can be added to gradients that have given their memory";
  std::vector<int> all(group().size());
  std::iota(all.begin(), all.end(), 0);
  const std::vector<int> last{group().size() - 1};
  for (const bool to_none : {true, false}) {
    zero_after_a_failure(GetParam(), Point::last_gradient, all, /*says_so=*/false, to_none);
    zero_after_a_failure(GetParam(), Point::last_gradient, last, /*says_so=*/false, to_none);
    zero_after_a_failure(GetParam(), Point::last_gradient, last, /*says_so=*/true, to_none);
    zero_after_a_failure(GetParam(), Point::forward, last, /*says_so=*/true, to_none);
  }
}

}  // namespace
}  // namespace shoal::abandoned_steps_test
