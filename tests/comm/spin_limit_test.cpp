#include "comm/shm/spin_limit.h"

#include <gtest/gtest.h>

#include <chrono>

namespace {

using namespace std::chrono_literals;
using shoal::shm::SpinLimit;

TEST(SpinLimit, short_waits_are_polled_to_their_end_and_long_ones_give_the_core_up) {
  SpinLimit limit;
  EXPECT_EQ(limit.now(), SpinLimit::least);
  limit.slept(80us);
  EXPECT_EQ(limit.now(), 160us);
  limit.slept(60us);  // a shorter one does not make it smaller
  EXPECT_EQ(limit.now(), 160us);
  limit.slept(300us);
  EXPECT_EQ(limit.now(), SpinLimit::most);
  limit.slept(1ms);
  EXPECT_EQ(limit.now(), 300us);
  for (int i = 0; i < 20; ++i) limit.slept(1s);
  EXPECT_EQ(limit.now(), SpinLimit::least);
}

// In a step of a large model one wait is long, and others are short.
TEST(SpinLimit, one_long_wait_among_short_ones_does_not_make_these_sleep) {
  SpinLimit limit;
  for (int step = 0; step < 100; ++step) {
    limit.slept(5ms);
    if (limit.now() < 100us) limit.slept(100us);
    if (step > 0) {
      EXPECT_GE(limit.now(), 100us);
    }
  }
}

}  // namespace
