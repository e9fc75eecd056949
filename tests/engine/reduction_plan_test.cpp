// Plan of a strategy's reduction: which gradients share a bucket, and which rank keeps what.

#include "engine/buckets/reduction_plan.h"

#include <gtest/gtest.h>

#include "comm/transport/dry_run.h"
#include "engine/reducer/gradient_reduction.h"

namespace shoal {
namespace {

using Plan = std::vector<std::vector<size_t>>;

std::vector<Gradient> three(const at::TensorOptions& options = at::kFloat) {
  std::vector<Gradient> list;
  for (const auto* name : {"a", "b", "c"}) list.push_back({name, at::ones({10}, options)});
  return list;
}

const std::vector<size_t> arrived = {1, 2, 0};

TEST(ReductionPlan, all_reduce_gives_every_rank_everything_and_follows_the_order) {
  const auto group = dry_run_group(2);
  const AllReduce reduction(group, {.first_bytes = 40, .bytes = 40});
  const auto& plan = reduction.plan();
  EXPECT_EQ(plan.buckets(three(), arrived), (Plan{{1}, {2}, {0}}));
  EXPECT_TRUE(plan.everywhere());
  const Bucket bucket(three(), {1}, group, plan, /*with_trailer=*/true);
  for (const int rank : {0, 1}) {
    EXPECT_TRUE(plan.keeps_whole(bucket, rank));
    EXPECT_EQ(plan.kept(bucket, rank).size(), bucket.payload_numel());
  }
  EXPECT_FALSE(bucket.transient());
}

TEST(ReductionPlan, SDP01_one_owner_per_bucket_keeps_its_sum) {
  const auto group = dry_run_group(2);
  const ReduceToOwner reduction(group, {}, {0, 1, 0});
  const auto& plan = reduction.plan();
  EXPECT_EQ(plan.buckets(three(), arrived), (Plan{{1}, {2, 0}}));
  EXPECT_FALSE(plan.everywhere());
  const Bucket other(three(), {1}, group, plan, /*with_trailer=*/false);
  EXPECT_TRUE(plan.kept(other, 0).empty());
  EXPECT_TRUE(plan.keeps_whole(other, 1));
  EXPECT_TRUE(other.transient()) << "rank 0 keeps nothing of it";
}

TEST(ReductionPlan, MEG01_equal_ranges_make_up_the_bucket_in_the_order_of_registration) {
  const auto group = dry_run_group(3);
  const ReduceScatter reduction(group, {});
  const auto& plan = reduction.plan();
  EXPECT_EQ(plan.buckets(three(), arrived), (Plan{{2, 1, 0}}));
  const Bucket bucket(three(), {2, 1, 0}, group, plan, /*with_trailer=*/false);
  int64_t begin = 0;
  for (int rank = 0; rank < 3; ++rank) {
    const auto range = plan.kept(bucket, rank);
    EXPECT_EQ(range.begin, begin);
    EXPECT_FALSE(plan.keeps_whole(bucket, rank));
    begin = range.end;
  }
  EXPECT_EQ(begin, bucket.payload_numel());
}

TEST(ReductionPlan, the_trailer_rides_only_where_it_gets_everywhere_exactly) {
  const auto group = dry_run_group(2);
  auto plan = AllReduce(group, {}).plan();
  EXPECT_FALSE(plan.trailer_apart(three()));
  EXPECT_TRUE(plan.trailer_apart(three(at::kBFloat16))) << "16 bits cannot count";
  EXPECT_TRUE(plan.trailer_apart(three(at::kMeta))) << "the CPU would wait for the device";
  EXPECT_EQ(ReductionPlan::trailer_dtype(three()), at::kFloat);
  EXPECT_EQ(ReductionPlan::trailer_dtype(three(at::kDouble)), at::kDouble) << "a weight of 0.1 must not be rounded";
  plan.consumed = true;
  EXPECT_FALSE(plan.trailer_apart(three(at::kMeta))) << "an update within backward needs the weight at once";
  plan.consumed = false;
  plan.trailer_rides = false;
  EXPECT_TRUE(plan.trailer_apart(three())) << "a hook may round";
  EXPECT_TRUE(ReduceScatter(group, {}).plan().trailer_apart(three())) << "parts do not reach everybody";
}

}  // namespace
}  // namespace shoal
