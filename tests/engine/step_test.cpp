// Step: its own state, and what the next step finds.

#include "engine/reducer/step.h"

#include <gtest/gtest.h>

#include "comm/transport/dry_run.h"
#include "engine/reducer/reducer.h"

namespace shoal {
namespace {

// Two parameters, reduced by one of two ranks; the other contributes nothing.
struct Training {
  at::Tensor a = at::ones({3}).set_requires_grad(true);
  at::Tensor b = at::ones({3}).set_requires_grad(true);
  Group group = dry_run_group(2);
  Reducer reducer{
      {{"a", a}, {"b", b}}, group, {.find_unused_parameters = true}, std::make_unique<AllReduce>(group, BucketCaps{})};

  at::Tensor gradient() {
    a.mutable_grad().reset();
    b.mutable_grad().reset();
    (a * b * 2).sum().backward();
    return a.grad();
  }
};

TEST(Step, lasts_from_the_first_gradient_to_the_end_of_backward) {
  Training training;
  std::vector<bool> running;
  for (const auto* parameter : {&training.a, &training.b}) {
    parameter->register_hook([&](const at::Tensor&) { running.push_back(training.reducer.running()); });
  }
  training.gradient();
  EXPECT_EQ(running, (std::vector<bool>{false, true}));
  EXPECT_FALSE(training.reducer.running());
  EXPECT_EQ(training.reducer.step(), 1);
}

TEST(Step, one_that_was_abandoned_leaves_nothing_to_the_next) {
  Training training;
  training.reducer.expect_backward();
  training.reducer.mark_failed();
  EXPECT_TRUE(training.reducer.broken());
  training.reducer.abandon();
  EXPECT_FALSE(training.reducer.broken());
  EXPECT_EQ(training.reducer.step(), 1);
  EXPECT_TRUE(at::equal(training.gradient(), at::full({3}, 2.0)));
  EXPECT_EQ(training.reducer.unused(), std::vector<size_t>{});
}

TEST(Step, one_that_broke_in_the_middle_of_backward_leaves_nothing_to_the_next) {
  Training training;
  bool fails = true;
  training.a.register_hook([&](const at::Tensor&) {
    if (std::exchange(fails, false)) throw std::runtime_error("fails");
  });
  training.reducer.expect_backward();
  EXPECT_ANY_THROW(training.gradient());
  training.reducer.mark_failed();
  training.reducer.abandon();
  EXPECT_TRUE(at::equal(training.gradient(), at::full({3}, 2.0)));
  EXPECT_EQ(training.reducer.step(), 2);
}

class FailsAtTheEnd : public AllReduce {
 public:
  using AllReduce::AllReduce;
  PendingExchange reduce(Bucket& bucket, const Label& label) const override {
    auto sum = AllReduce::reduce(bucket, label);
    if (label.step == 0) sum.finish = [] { throw std::runtime_error("injected"); };
    return sum;
  }
};

TEST(Step, one_whose_sums_fail_when_the_trailer_has_gone_is_no_success) {
  Training training;
  const auto a = at::ones({3}).set_requires_grad(true);
  Reducer reducer({{"a", a}}, training.group, {}, std::make_unique<FailsAtTheEnd>(training.group, BucketCaps{}));
  EXPECT_THROW((a * 2).sum().backward(), std::runtime_error);
  EXPECT_FALSE(reducer.running());
  a.mutable_grad().reset();
  (a * 2).sum().backward();
  EXPECT_TRUE(at::equal(a.grad(), at::full({3}, 2.0)));
}

TEST(Step, knows_from_its_buckets_what_is_ready) {
  Training training;
  BucketSet buckets(training.reducer.gradients(), training.group, training.reducer.reduction().plan());
  const auto before = buckets.build({1, 0});
  Step step(Step::From::no_batch, buckets, {}, /*may_wait=*/true);
  EXPECT_FALSE(step.schedule.next_is_full());
  for (const size_t gradient : {0, 1}) step.schedule.mark_ready(gradient);
  EXPECT_TRUE(step.schedule.next_is_full());
  EXPECT_EQ(step.sparse.size(), buckets.size());
  EXPECT_EQ(step.used_anywhere, (std::vector<bool>{false, false}));
}

}  // namespace
}  // namespace shoal
