#include "comm/shm/host_load.h"

#include <gtest/gtest.h>

#include <thread>

#include "tests/comm/busy_cores.h"

namespace {

using namespace std::chrono_literals;
using shoal::shm::HostLoad;
using shoal::shm::runnable_threads;
namespace test = shoal::test;

TEST(HostLoad, the_number_of_threads_that_want_to_run_is_the_fourth_field) {
  EXPECT_EQ(runnable_threads("0.20 0.18 0.12 3/80 11206\n"), 3);
  EXPECT_EQ(runnable_threads("0.00 0.00 0.00 0/0 0"), 0);
  for (const auto* text : {"", "0.20 0.18 0.12", "0.20 0.18 0.12 ", "0.20 0.18 0.12 3", "0.20 0.18 0.12 x/80 1",
                           "0.20 0.18 0.12 99999999999/80 1"}) {
    EXPECT_EQ(runnable_threads(text), std::nullopt) << text;
  }
}

TEST(HostLoad, programs_that_compute_on_more_threads_than_cores_are_seen_and_those_of_one_moment_are_not) {
  if (!test::BusyCores::seen()) GTEST_SKIP() << "this system does not tell, or gives this process some cores only";
  const test::BusyCores busy;
  HostLoad load;
  auto now = std::chrono::steady_clock::now();
  EXPECT_FALSE(load.crowded(now)) << "after one look";
  EXPECT_FALSE(load.crowded(now + HostLoad::interval / 2)) << "after one look";
  const auto end = now + 10s;
  while (!load.crowded(now) && now < end) {
    std::this_thread::sleep_for(HostLoad::interval);
    now = std::chrono::steady_clock::now();
  }
  EXPECT_TRUE(load.crowded(now));
}

}  // namespace
