// Which rank is late, from flight recorders.

#include "cli/telemetry/lateness.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <chrono>
#include <iostream>
#include <limits>
#include <thread>

#include "comm/telemetry/flight_recorder.h"
#include "comm/telemetry/verdict.h"
#include "tests/support/temp_folder.h"

namespace shoal::cli::lateness_test {
namespace {

Call call_of(int64_t step) {
  Call call;
  call.op = Op::all_reduce;
  call.inputs = {at::ones({4})};
  call.label = {step, 0, "gradients"};
  return call;
}

TEST(Lateness, is_the_mean_delay_behind_the_first_rank) {
  const test::TempFolder folder;
  FlightRecorder first(folder.path(), 0, 2), second(folder.path(), 1, 2);
  for (auto* recorder : {&first, &second}) {
    recorder->join({this_process(), this_process()});
    recorder->add_group("world", {0, 1}, {});
  }
  constexpr int steps = 5;
  for (int step = 0; step < steps; ++step) {
    const auto early = first.enter(FlightRecord::collective, 0, call_of(step), step);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    const auto late = second.enter(FlightRecord::collective, 0, call_of(step), step);
    second.finished(late);
    if (step + 1 < steps) first.finished(early);
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const auto views = rank_views(read_flights({folder.path()}));
  ASSERT_EQ(views.size(), 2U);
  EXPECT_EQ(views[0].late_ms, 0);
  EXPECT_GE(views[1].late_ms.value(), 20);
  EXPECT_LT(views[1].late_ms.value(), 2000);
  EXPECT_GE(views[0].waiting_s, 0.05) << "in the operation that it has not finished";
  EXPECT_EQ(views[1].waiting_s, 0);
  for (const auto& view : views) {
    EXPECT_EQ(view.state, "running");
    EXPECT_EQ(view.step, steps - 1);
    EXPECT_THAT(view.operation, testing::HasSubstr("all_reduce(sum, 4 x Float), step 4, bucket 0: gradients"));
  }
}

// The clock that people see may be set, or go on while the machine sleeps.
TEST(Lateness, a_wait_is_that_of_the_steady_clock) {
  const test::TempFolder folder;
  FlightRecorder only(folder.path(), 0, 1);
  only.join({this_process()});
  only.add_group("world", {0}, {});
  only.enter(FlightRecord::collective, 0, call_of(3), 0);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  auto flights = read_flights({folder.path()});
  for (const int64_t hours : {-1, 1}) {
    flights.front().epoch_ns += hours * 3'600'000'000'000;
    const double waiting = rank_views(flights).front().waiting_s;
    EXPECT_GE(waiting, 0.05) << hours;
    EXPECT_LT(waiting, 60) << hours;
  }
}

TEST(Lateness, is_not_known_of_a_rank_alone) {
  const test::TempFolder folder;
  FlightRecorder only(folder.path(), 0, 2);
  only.join({this_process(), this_process()});
  only.add_group("world", {0, 1}, {});
  only.enter(FlightRecord::collective, 0, call_of(3), 0);
  const auto views = rank_views(read_flights({folder.path()}));
  ASSERT_EQ(views.size(), 1U);
  EXPECT_FALSE(views[0].late_ms);
}

// A healthy job of `ranks` ranks, 8 on a host, each with its last 64 collectives.
std::vector<Flight> large_job(int ranks) {
  const Flight::Members world{.name = "world", .world_ranks = fmt::format("0-{}", ranks - 1)};
  std::vector<Flight> flights(ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    auto& flight = flights[rank];
    flight.rank = rank;
    flight.size = ranks;
    flight.host = "host-" + std::to_string(rank / 8);
    flight.epoch_ns = rank / 8;  // each host has its own
    flight.groups = {world};
    for (uint64_t number = 1; number <= 64; ++number) {
      Flight::Record record{.group = 0};
      record.print.number = number;
      record.entered = static_cast<int64_t>(1'000'000 * number) + rank % 8;
      record.finished = record.entered + 1000;
      flight.records.push_back(record);
    }
  }
  return flights;
}

double seconds_of_a_look(int ranks) {
  const auto flights = large_job(ranks);
  double least = std::numeric_limits<double>::infinity();
  for (int repeat = 0; repeat < 5; ++repeat) {
    const auto start = std::chrono::steady_clock::now();
    EXPECT_EQ(rank_views(flights).size(), flights.size());
    EXPECT_EQ(verdict(flights).size(), 1U);
    least = std::min(least, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return least;
}

TEST(Lateness, the_time_of_a_look_grows_linearly_with_ranks) {
  const double few = seconds_of_a_look(128), many = seconds_of_a_look(1024);
  std::cout << "128 ranks on 16 hosts: " << few << " s; 1024 ranks on 128 hosts: " << many << " s\n";
  EXPECT_LT(many, 40 * few) << "8 times as many ranks; squared: 64 times";
  const auto views = rank_views(large_job(1024));
  EXPECT_NEAR(views[1023].late_ms.value(), 134e-6, 1e-9)
      << "7 ns behind its host's first rank, whose clock is 127 ns ahead";
}

}  // namespace
}  // namespace shoal::cli::lateness_test
