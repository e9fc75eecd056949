// Assignment of gradients to buckets.

#include "engine/buckets/bucket_plan.h"

#include <gtest/gtest.h>

#include <numeric>
#include <random>

namespace shoal {
namespace {

using Plan = std::vector<std::vector<size_t>>;

std::vector<Gradient> gradients(const std::vector<std::pair<int64_t, at::ScalarType>>& shapes) {
  std::vector<Gradient> list;
  for (const auto& [numel, dtype] : shapes) {
    list.push_back({"p" + std::to_string(list.size()), at::empty({numel}, dtype), false});
  }
  return list;
}

std::vector<size_t> reversed(size_t count) {
  std::vector<size_t> order(count);
  std::iota(order.rbegin(), order.rend(), 0);
  return order;
}

TEST(BucketPlan, closes_a_bucket_when_it_holds_the_cap) {
  const auto list = gradients({{10, at::kFloat}, {10, at::kFloat}, {10, at::kFloat}, {10, at::kFloat}});
  EXPECT_EQ(plan_buckets(list, reversed(4), 40, 80), (Plan{{3}, {2, 1}, {0}}));
  EXPECT_EQ(plan_buckets(list, reversed(4), 1 << 20, 1 << 20), (Plan{{3, 2, 1, 0}}));
}

TEST(BucketPlan, keeps_dtypes_apart_and_orders_buckets_by_completion) {
  const auto list = gradients({{10, at::kFloat}, {10, at::kDouble}, {10, at::kFloat}});
  // The float bucket is full last, once gradient 0 has arrived.
  EXPECT_EQ(plan_buckets(list, reversed(3), 1000, 1000), (Plan{{1}, {2, 0}}));
}

TEST(BucketPlan, MEG02_keeps_parameters_of_different_dtypes_apart_whose_gradients_travel_alike) {
  auto list = gradients({{10, at::kFloat}, {10, at::kBFloat16}, {10, at::kFloat}});
  list[1].reduce_dtype = at::kFloat;
  EXPECT_EQ(plan_buckets(list, reversed(3), 1000, 1000), (Plan{{1}, {2, 0}}));
}

TEST(BucketPlan, gives_sparse_gradients_buckets_of_their_own) {
  auto list = gradients({{10, at::kFloat}, {10, at::kFloat}, {10, at::kFloat}});
  list[1].sparse = true;
  EXPECT_EQ(plan_buckets(list, reversed(3), 1000, 1000), (Plan{{1}, {2, 0}}));
}

TEST(BucketPlan, assigns_every_gradient_exactly_once_whatever_the_shapes) {
  std::mt19937 random(5);
  for (int repeat = 0; repeat < 300; ++repeat) {
    std::vector<std::pair<int64_t, at::ScalarType>> shapes;
    for (size_t i = 0; i < random() % 30; ++i) {
      shapes.emplace_back(random() % 100, random() % 3 == 0 ? at::kBFloat16 : at::kFloat);
    }
    auto list = gradients(shapes);
    for (auto& gradient : list) gradient.sparse = random() % 10 == 0;
    auto order = reversed(list.size());
    std::shuffle(order.begin(), order.end(), random);
    const auto plan = plan_buckets(list, order, 64, 256);
    std::vector<int> count(list.size());
    for (const auto& bucket : plan) {
      ASSERT_FALSE(bucket.empty());
      int64_t bytes = 0;
      for (const auto member : bucket) {
        ++count[member];
        ASSERT_EQ(list[member].parameter.dtype(), list[bucket.front()].parameter.dtype());
        ASSERT_TRUE(!list[member].sparse || bucket.size() == 1);
        bytes += static_cast<int64_t>(list[member].parameter.nbytes());
      }
      const auto last = static_cast<int64_t>(list[bucket.back()].parameter.nbytes());
      ASSERT_TRUE(bytes - last < 256) << "closed as soon as full";
    }
    for (const int times : count) ASSERT_EQ(times, 1);
  }
}

}  // namespace
}  // namespace shoal
