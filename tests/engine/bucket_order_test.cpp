// Order of gradients that buckets follow: learnt once, the same on all ranks.

#include "engine/buckets/bucket_order.h"

#include <gtest/gtest.h>

#include "comm/transport/dry_run.h"

namespace shoal {
namespace {

using Order = std::vector<size_t>;

TEST(BucketOrder, is_learnt_from_the_first_step_alone) {
  BucketOrder order(/*follows=*/true);
  EXPECT_FALSE(order.due());
  EXPECT_FALSE(order.learnt());
  order.learn({2, 0}, /*from=*/1);
  order.learn({0, 1, 2}, /*from=*/0);
  EXPECT_TRUE(order.due());
  EXPECT_EQ(order.learnt()->order, (Order{2, 0}));
  EXPECT_EQ(order.learnt()->from, 1);
}

TEST(BucketOrder, lists_what_did_not_arrive_as_registered_last_first) {
  BucketOrder order(/*follows=*/true);
  order.learn({2, 0}, 0);
  EXPECT_EQ(order.agree(dry_run_group(2), 5, /*step=*/1), (Order{2, 0, 4, 3, 1}));
  EXPECT_FALSE(order.due());
  EXPECT_TRUE(order.followed());
}

TEST(BucketOrder, is_never_due_where_buckets_follow_none) {
  BucketOrder order(/*follows=*/false);
  order.learn({1, 0}, 0);
  EXPECT_FALSE(order.due());
  EXPECT_FALSE(order.learnt());
  EXPECT_FALSE(order.resume_from(BucketOrder::Learnt{{1, 0}, 0}));
  EXPECT_FALSE(order.due());
}

TEST(BucketOrder, goes_on_from_anothers_or_from_none) {
  BucketOrder order(/*follows=*/true);
  EXPECT_FALSE(order.resume_from(BucketOrder::Learnt{{1, 0}, 1}));
  EXPECT_TRUE(order.due());
  EXPECT_FALSE(order.resume_from(std::nullopt)) << "buckets do not follow it yet";
  order.learn({0, 1}, 0);
  order.agree(dry_run_group(2), 2, 1);
  EXPECT_TRUE(order.resume_from(std::nullopt)) << "buckets follow it, and are to follow none";
  EXPECT_FALSE(order.due());
  EXPECT_FALSE(order.learnt());
}

}  // namespace
}  // namespace shoal
