// Which rank is late, from flight recorders.

#include "cli/telemetry/lateness.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <chrono>
#include <thread>

#include "comm/telemetry/flight_recorder.h"
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
    recorder->add_group("world", {0, 1});
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

TEST(Lateness, is_not_known_of_a_rank_alone) {
  const test::TempFolder folder;
  FlightRecorder only(folder.path(), 0, 2);
  only.join({this_process(), this_process()});
  only.add_group("world", {0, 1});
  only.enter(FlightRecord::collective, 0, call_of(3), 0);
  const auto views = rank_views(read_flights({folder.path()}));
  ASSERT_EQ(views.size(), 1U);
  EXPECT_FALSE(views[0].late_ms);
}

}  // namespace
}  // namespace shoal::cli::lateness_test
