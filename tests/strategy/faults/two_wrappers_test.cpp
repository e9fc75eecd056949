// BEY10 with two wrappers: an exception in a backward that they share ends the step of both, on all ranks. Not for
// DistributedOptimizer, which sees no forward.

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/utils/convert_parameters.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>
#include <utility>

#include "shoal/call_log.h"
#include "shoal/ddp.h"
#include "shoal/error.h"
#include "tests/support/models.h"
#include "tests/support/training.h"
#include "tests/support/world.h"

namespace shoal::two_wrappers_test {
namespace {

using test::batch;
using test::difference;
using test::group;

struct Injected : std::runtime_error {
  Injected() : std::runtime_error("injected") {}
};

// Two networks in a row, each with its wrapper and its optimizer, that are trained by one loss.
struct TwoInARow {
  static std::shared_ptr<test::MlpImpl> make(int64_t in) {
    torch::manual_seed(in);
    return std::make_shared<test::MlpImpl>(in, 16, 5);
  }
  static test::Training<test::MlpImpl> wrap(const std::string& strategy, int64_t in) {
    return test::Training<test::MlpImpl>::make<torch::optim::SGD>(strategy, make(in), group(), options(),
                                                                  {.bucket_mb = 1e-4});
  }
  static torch::optim::SGDOptions options() { return torch::optim::SGDOptions(0.1).momentum(0.9); }

  // between: fails there, else below both.
  void train(int64_t step, bool fails, bool between) {
    lower.zero_grad();
    upper.zero_grad();
    auto x = batch(group().rank(), step).requires_grad_() * 1;
    auto y = lower.forward(x);
    (between ? y : x).register_hook([fails](const at::Tensor&) {
      if (fails) throw Injected();
    });
    upper.forward(y).pow(2).mean().backward();
    upper.step();
    lower.step();
  }
  static std::vector<at::Tensor> reference(const std::vector<int64_t>& steps) {
    const auto first = make(12), second = make(5);
    auto all = first->parameters();
    for (const auto& parameter : second->parameters()) all.push_back(parameter);
    torch::optim::SGD optimizer(all, options());
    for (const auto step : steps) {
      optimizer.zero_grad();
      for (int rank = 0; rank < group().size(); ++rank) {
        (second->forward(first->forward(batch(rank, step))).pow(2).mean() / group().size()).backward();
      }
      optimizer.step();
    }
    return all;
  }
  std::vector<at::Tensor> parameters() const {
    auto all = lower.model->parameters();
    for (const auto& parameter : upper.model->parameters()) all.push_back(parameter);
    return all;
  }

  explicit TwoInARow(const std::string& strategy) : lower(wrap(strategy, 12)), upper(wrap(strategy, 5)) {}
  test::Training<test::MlpImpl> lower, upper;
};

bool all_ranks_have(const std::vector<at::Tensor>& parameters) {
  const auto own = torch::nn::utils::parameters_to_vector(parameters).detach().clone();
  auto most = own.clone();
  group().all_reduce(most, ReduceOp::max).wait();
  return most.equal(own);
}

// One of the networks, in one process.
std::vector<at::Tensor> trained_alone(int64_t in, const std::vector<int64_t>& steps) {
  const auto model = TwoInARow::make(in);
  torch::optim::SGD optimizer(model->parameters(), TwoInARow::options());
  for (const auto step : steps) {
    optimizer.zero_grad();
    for (int rank = 0; rank < group().size(); ++rank) {
      (model->forward(batch(rank, step, 0, 4, in)).pow(2).mean() / group().size()).backward();
    }
    optimizer.step();
  }
  return model->parameters();
}

class TwoWrappers : public testing::TestWithParam<std::string> {};

TEST_P(TwoWrappers, BEY10_an_exception_below_one_of_two_wrappers_ends_the_step_of_both_on_all) {
  const bool pages = GetParam().starts_with("fsdp") && GetParam() != "fsdp_no_shard" && group().transport() != "host";
  if (pages) GTEST_SKIP() << "the gathers of the others wait for those of the rank that has failed";
  for (const int64_t failing : {0, 1}) {
    for (const bool between : {false, true}) {
      SCOPED_TRACE(fmt::format("step {}, between {}", failing, between));
      TwoInARow both(GetParam());
      for (int64_t step = 0; step < 4; ++step) {
        const bool here = step == failing && group().rank() == group().size() - 1;
        try {
          both.train(step, here, between);
          EXPECT_NE(step, failing);
        } catch (const std::runtime_error& error) {
          EXPECT_EQ(step, failing) << error.what();
        }
      }
      std::vector<int64_t> good{0, 1, 2, 3};
      std::erase(good, failing);
      EXPECT_LT(difference(both.parameters(), TwoInARow::reference(good)), 1e-12);
    }
  }
}

// As in a loop that trains two networks in turn, and leaves a batch of the first one only.
TEST_P(TwoWrappers, BEY10_an_exception_in_one_of_two_that_take_turns_ends_its_step_alone) {
  const bool pages = GetParam().starts_with("fsdp") && GetParam() != "fsdp_no_shard" && group().transport() != "host";
  if (pages) GTEST_SKIP() << "the gathers of the others wait for those of the rank that has failed";
  for (const bool in_forward : {false, true}) {
    SCOPED_TRACE(in_forward);
    TwoInARow both(GetParam());
    for (int64_t step = 0; step < 3; ++step) {
      const bool here = step == 1 && group().rank() == 0;
      try {
        both.lower.zero_grad();
        const int64_t features = here && in_forward ? 13 : 12;
        const auto y = both.lower.forward(batch(group().rank(), step, 0, 4, features));
        if (here) y.register_hook([](const at::Tensor&) { throw Injected(); });
        y.pow(2).mean().backward();
        both.lower.step();
        EXPECT_NE(step, 1);
      } catch (const std::exception& error) {
        EXPECT_EQ(step, 1) << error.what();
      }
      both.upper.zero_grad();
      both.upper.forward(batch(group().rank(), step, 0, 4, 5)).pow(2).mean().backward();
      both.upper.step();
    }
    EXPECT_LT(difference(both.lower.model->parameters(), trained_alone(12, {0, 2})), 1e-12);
    EXPECT_LT(difference(both.upper.model->parameters(), trained_alone(5, {0, 1, 2})), 1e-12);
  }
}

// As actor and critic, each with a loss of its own. The handler calls abandon_step() of both, or only of the one whose
// backward has not begun.
TEST_P(TwoWrappers, BEY10_an_exception_in_one_of_two_whose_forwards_come_first_is_handled_by_abandon_step) {
  const bool pages = GetParam().starts_with("fsdp") && GetParam() != "fsdp_no_shard" && group().transport() != "host";
  if (pages) GTEST_SKIP() << "the gathers of the others wait for those of the rank that has failed";
  struct Case {
    bool in_forward, of_both;
  };
  for (const auto& [in_forward, of_both] : {Case{false, true}, {false, false}, {true, true}}) {
    SCOPED_TRACE(fmt::format("in forward {}, of both {}", in_forward, of_both));
    TwoInARow both(GetParam());
    for (int64_t step = 0; step < 4; ++step) {
      const bool here = step == 1 && group().rank() == 0;
      try {
        both.lower.zero_grad();
        both.upper.zero_grad();
        const auto y = both.lower.forward(batch(group().rank(), step));
        if (here && !in_forward) y.register_hook([](const at::Tensor&) { throw Injected(); });
        const auto z = both.upper.forward(batch(group().rank(), step, 0, 4, here && in_forward ? 6 : 5));
        y.pow(2).mean().backward();
        z.pow(2).mean().backward();
        both.lower.step();
        both.upper.step();
        EXPECT_NE(step, 1);
      } catch (const std::exception& error) {
        EXPECT_EQ(step, 1) << error.what();
        if (of_both) both.lower.abandon_step();
        both.upper.abandon_step();
      }
    }
    EXPECT_LT(difference(both.lower.model->parameters(), trained_alone(12, {0, 2, 3})), 1e-12);
    EXPECT_LT(difference(both.upper.model->parameters(), trained_alone(5, {0, 2, 3})), 1e-12);
  }
}

// A program that goes on to step() has the same gradients on all ranks.
TEST(TwoDdp, BEY10_a_step_that_fails_below_two_wrappers_leaves_the_same_gradients_on_all) {
  for (const int64_t failing : {0, 1}) {
    TwoInARow both("ddp");
    for (int64_t step = 0; step < 3; ++step) {
      try {
        both.train(step, step == failing && group().rank() == 0, /*between=*/false);
        EXPECT_NE(step, failing);
      } catch (const std::runtime_error& error) {
        EXPECT_EQ(step, failing) << error.what();
        for (const auto& parameter : both.parameters()) {
          EXPECT_TRUE(!parameter.grad().defined() || parameter.grad().eq(0).all().item<bool>());
        }
        both.upper.step();
        both.lower.step();
      }
    }
    EXPECT_TRUE(all_ranks_have(both.parameters()));
  }
}

// Called by all ranks between the gradients of the two, while the last bucket of the upper one waits. Called by one
// alone after that bucket has left, it is too late: all ranks use the sums.
TEST(TwoDdp, BEY10_a_step_abandoned_in_a_hook_between_two_wrappers_ends_there) {
  for (const bool late : {false, true}) {
    SCOPED_TRACE(late);
    TwoInARow both("ddp");
    bool now = false;
    const auto abandon = [&](const at::Tensor&) {
      if (std::exchange(now, false)) both.upper.abandon_step();
    };
    if (late) both.lower.model->first->weight.register_hook(abandon);
    for (int64_t step = 0; step < 3; ++step) {
      now = step == 1 && (!late || group().rank() == 0);
      both.lower.zero_grad();
      both.upper.zero_grad();
      const auto y = both.lower.forward(batch(group().rank(), step));
      if (!late) y.register_hook(abandon);
      both.upper.forward(y).pow(2).mean().backward();
      EXPECT_FALSE(now);
      for (const auto& parameter : both.upper.model->parameters()) {
        const bool used = parameter.grad().defined() && parameter.grad().ne(0).any().item<bool>();
        EXPECT_EQ(used, late || step != 1) << step;
      }
      EXPECT_TRUE(both.lower.model->first->weight.grad().ne(0).any().item<bool>());
      if (late || step != 1) both.upper.step();
      both.lower.step();
    }
    if (late) EXPECT_LT(difference(both.parameters(), TwoInARow::reference({0, 1, 2})), 1e-12);
    EXPECT_TRUE(all_ranks_have(both.parameters()));
  }
}

TEST(TwoDdp, BEY10_the_buckets_of_the_upper_one_leave_before_those_of_the_lower_one) {
  auto log = std::make_shared<CallLog>();
  const auto make = [&](int64_t in, int64_t out) { return std::make_shared<test::MlpImpl>(in, 16, out); };
  torch::manual_seed(1);
  const auto lower = make(12, 5);
  const auto upper = make(5, 5);
  const DistributedDataParallelOptions options{.bucket_cap_mb = 1e-4, .first_bucket_mb = 1e-4};
  DistributedDataParallel first(lower, group().recorded(log), options);
  DistributedDataParallel second(upper, group().recorded(log), options);
  auto parameters = lower->parameters();
  for (const auto& parameter : upper->parameters()) parameters.push_back(parameter);
  torch::optim::SGD optimizer(parameters, 0.1);
  for (int64_t step = 0; step < 5; ++step) {
    optimizer.zero_grad();
    const bool fails = step == 2 && group().rank() == 0;
    auto x = batch(group().rank(), step).requires_grad_() * 1;
    x.register_hook([fails](const at::Tensor&) {
      if (fails) throw Injected();
    });
    const auto loss = second.forward(first.forward(x)).pow(2).mean();
    log->clear();
    try {
      loss.backward();
      optimizer.step();
      EXPECT_NE(step, 2);
    } catch (const std::exception& error) {
      EXPECT_EQ(step, 2) << error.what();
      continue;
    }
    std::vector<std::string> buckets;
    for (const auto& record : log->records()) {
      if (record.label.bucket >= 0) buckets.push_back(record.label.what);
    }
    ASSERT_GT(buckets.size(), 2U);
    const auto upper_number = buckets.front().substr(0, buckets.front().find("'s "));
    const auto is_upper = [&](const std::string& what) { return what.starts_with(upper_number); };
    EXPECT_TRUE(std::is_partitioned(buckets.begin(), buckets.end(), is_upper)) << fmt::format("{}", buckets);
    EXPECT_FALSE(is_upper(buckets.back()));
  }
  EXPECT_TRUE(all_ranks_have(parameters));
}

INSTANTIATE_TEST_SUITE_P(Strategies, TwoWrappers,
                         testing::Values("ddp", "zero1", "zero2", "fsdp", "fsdp_grad_op", "fsdp_no_shard",
                                         "fsdp_hybrid", "fsdp_hybrid_grad_op"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace shoal::two_wrappers_test
