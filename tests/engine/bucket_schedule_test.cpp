// Schedule of a step's buckets: when they are full, issued and reduced, and whose memory is freed.

#include "engine/buckets/bucket_schedule.h"

#include <gtest/gtest.h>
#include <torch/utils.h>

#include <numeric>

#include "comm/transport/dry_run.h"
#include "engine/reducer/gradient_reduction.h"

namespace shoal {
namespace {

using Plan = std::vector<std::vector<size_t>>;

// Four gradients of ten elements in buckets of one each, in the order 3, 2, 1, 0. Rank 1 owns the sums, so that this
// rank's buckets are freed once they are reduced.
struct WithBuckets {
  WithBuckets() {
    for (const auto* name : {"a", "b", "c", "d"}) gradients.push_back({name, at::ones({10}).set_requires_grad(true)});
    reduction = std::make_unique<ReduceToOwner>(group, BucketCaps{40, 40}, std::vector<int>(4, 1));
    buckets = std::make_unique<BucketSet>(gradients, group, reduction->plan());
    build({3, 2, 1, 0});
  }
  void build(const std::vector<size_t>& order) {
    const auto before = buckets->build(order);
    EXPECT_TRUE(before.empty());
  }
  Plan members() const {
    Plan plan;
    for (const auto& bucket : *buckets) plan.push_back(bucket.members());
    return plan;
  }

  Group group = dry_run_group(2);
  std::vector<Gradient> gradients;
  std::unique_ptr<GradientReduction> reduction;
  std::unique_ptr<BucketSet> buckets;
};

TEST(BucketSet, follows_the_order_and_knows_each_gradients_place) {
  WithBuckets with;
  EXPECT_EQ(with.members(), (Plan{{3}, {2}, {1}, {0}}));
  with.build({0, 1, 2, 3});
  EXPECT_EQ(with.members(), (Plan{{0}, {1}, {2}, {3}}));
  EXPECT_EQ(with.buckets->places()[2].bucket, 2u);
}

TEST(BucketSet, hands_back_buckets_that_gradients_lie_in_yet) {
  WithBuckets with;
  with.gradients[1].parameter.mutable_grad() = with.buckets->acquire(1);
  const auto before = with.buckets->build({0, 1, 2, 3});
  ASSERT_EQ(before.size(), 1u);
  EXPECT_EQ(before.front().members(), std::vector<size_t>{1});
}

TEST(BucketSet, a_bucket_of_frozen_gradients_rests_and_is_not_the_last) {
  WithBuckets with;
  EXPECT_TRUE((*with.buckets)[3].last());
  with.buckets->set_frozen({true, false, false, false});
  EXPECT_TRUE(with.buckets->all_frozen(3));
  EXPECT_FALSE((*with.buckets)[3].last());
  EXPECT_TRUE((*with.buckets)[2].last());
  EXPECT_TRUE(with.buckets->any_trainable());
  with.buckets->set_frozen({true, true, true, true});
  EXPECT_FALSE(with.buckets->any_trainable());
}

TEST(BucketSet, a_released_buckets_memory_is_the_next_ones) {
  const torch::NoGradGuard no_grad;
  WithBuckets with;
  // Too large to be kept for the next step.
  with.gradients.clear();
  for (const auto* name : {"a", "b"}) with.gradients.push_back({name, at::ones({2 << 20}).set_requires_grad(true)});
  with.reduction = std::make_unique<ReduceToOwner>(with.group, BucketCaps{40, 40}, std::vector<int>(2, 1));
  with.buckets = std::make_unique<BucketSet>(with.gradients, with.group, with.reduction->plan());
  with.build({1, 0});
  with.gradients[1].parameter.mutable_grad() = with.buckets->acquire(1);
  const auto* memory = (*with.buckets)[0].flat().data_ptr();
  with.buckets->release(0);
  EXPECT_FALSE(with.gradients[1].parameter.grad().defined()) << "it lay in the bucket";
  EXPECT_FALSE((*with.buckets)[0].present());
  with.buckets->acquire(0);
  EXPECT_EQ((*with.buckets)[1].flat().data_ptr(), memory);
}

TEST(BucketSchedule, buckets_leave_in_their_order_whatever_order_they_fill_in) {
  WithBuckets with;
  BucketSchedule schedule(*with.buckets, {}, /*may_wait=*/true);
  schedule.mark_ready(2);
  EXPECT_FALSE(schedule.next_is_full());
  schedule.mark_ready(3);
  EXPECT_TRUE(schedule.next_is_full());
  schedule.pass_next();
  EXPECT_TRUE(schedule.next_is_full()) << "it filled before";
  schedule.pass_next();
  EXPECT_FALSE(schedule.next_is_full());
  EXPECT_EQ(schedule.next(), 2u);
  EXPECT_TRUE(schedule.is_ready(2));
  EXPECT_FALSE(schedule.is_ready(0));
}

TEST(BucketSchedule, a_bucket_that_rests_is_full) {
  WithBuckets with;
  with.buckets->set_frozen({false, false, false, true});
  const BucketSchedule schedule(*with.buckets, {}, /*may_wait=*/true);
  EXPECT_TRUE(schedule.next_is_full());
}

TEST(BucketSchedule, buckets_come_back_in_their_order_once_each) {
  WithBuckets with;
  BucketSchedule schedule(*with.buckets, {}, /*may_wait=*/true);
  EXPECT_FALSE(schedule.take_back(/*all=*/true)) << "none has left";
  std::vector<size_t> finished;
  for (size_t i = 0; i < 4; ++i) {
    schedule.set_sum(i, {.work = {}, .finish = [&, i] { finished.push_back(i); }});
    schedule.pass_next();
  }
  std::vector<size_t> back;
  while (const auto index = schedule.take_back(/*all=*/false)) back.push_back(*index);
  EXPECT_EQ(back, (std::vector<size_t>{0, 1, 2, 3}));
  EXPECT_TRUE(finished.empty()) << "the caller completes a sum, whose end may fail";
}

TEST(BucketSchedule, a_bucket_that_has_come_back_is_not_waited_for) {
  WithBuckets with;
  BucketSchedule schedule(*with.buckets, {}, /*may_wait=*/true);
  const auto start = std::chrono::steady_clock::now();
  schedule.await_oldest(std::chrono::hours(1));  // none has left
  schedule.set_sum(0, {.work = {}});
  schedule.pass_next();
  schedule.await_oldest(std::chrono::hours(1));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::minutes(1));
  EXPECT_EQ(schedule.take_back(/*all=*/false), 0U);
}

TEST(BucketSchedule, spare_memory_is_for_those_that_may_yet_travel) {
  WithBuckets with;
  BucketSchedule schedule(*with.buckets, {.in_flight = 2}, /*may_wait=*/true);
  EXPECT_EQ(schedule.most_spare(/*one_more=*/false), 2u);
  EXPECT_EQ(schedule.most_spare(/*one_more=*/true), 3u);
  schedule.pass_next();
  EXPECT_EQ(schedule.most_spare(/*one_more=*/false), 1u);
  schedule.pass_next();
  schedule.pass_next();
  EXPECT_EQ(schedule.most_spare(/*one_more=*/false), 0u);
  schedule.take_back(/*all=*/true);
  schedule.take_back(/*all=*/true);
  EXPECT_EQ(schedule.most_spare(/*one_more=*/false), 1u);
}

}  // namespace
}  // namespace shoal
