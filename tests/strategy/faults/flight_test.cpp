// Telemetry: whatever happens to a rank, the flight recorders show which rank, which operation and which bucket. With
// real processes, on shared memory and on Gloo, which on its own would hang, abort or sum unrelated data.

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>

#include "comm/telemetry/verdict.h"
#include "shoal/error.h"
#include "tests/support/processes.h"
#include "tests/support/temp_folder.h"
#include "tests/support/warm_program.h"

namespace shoal::test {
namespace {

using ::testing::HasSubstr;

#ifdef WARM_START
const bool warmed = (warm_up(FAULT_RANK, WARM_START), true);
#endif

constexpr int victim = 1;

class Flights : public ::testing::TestWithParam<const char*> {
 protected:
  // Three ranks without a launcher; rank 1 has a fault in step 3.
  std::vector<Ended> fly(const std::string& point) {
    const auto port = std::to_string(free_port());
    std::vector<Command> commands;
    for (int rank = 0; rank < 3; ++rank) {
      commands.push_back({{FAULT_RANK, point, std::to_string(victim), GetParam(), "4"},
                          {{"RANK", std::to_string(rank)},
                           {"WORLD_SIZE", "3"},
                           {"MASTER_ADDR", "127.0.0.1"},
                           {"MASTER_PORT", port},
                           {"OMP_NUM_THREADS", "1"},
                           {"SHOAL_FLIGHT_RECORDER", folder_.path()}}});
    }
    return run_together(commands, 40);
  }

  void expect_verdict(const std::string& point, const std::vector<std::string>& parts) {
    const auto ended = fly(point);
    const auto sentences = verdict(read_flights({folder_.path()}));
    for (const auto& part : parts) {
      EXPECT_THAT(sentences.front(), HasSubstr(part))
          << fmt::format("all: {}\nranks said: {}\n{}\n{}", fmt::join(sentences, "\n"), ended[0].output,
                         ended[1].output, ended[2].output);
    }
  }

  TempFolder folder_;
};

TEST_P(Flights, a_rank_killed_in_forward_never_entered_the_first_bucket) {
  expect_verdict("forward", {"rank 1 never entered #", "all_reduce(sum, ", "step 3, bucket 0: ", "is gone",
                             "ranks 0, 2 waited for it"});
}
TEST_P(Flights, a_rank_killed_in_backward_never_entered_the_next_bucket) {
  expect_verdict("backward", {"rank 1 never entered #", "step 3, bucket ", "is gone"});
}
TEST_P(Flights, a_rank_killed_in_a_collective_entered_it) {
  expect_verdict("all_reduce", {"rank 1 entered #", "step 3, bucket 0: ", "did not finish it", "is gone"});
}
TEST_P(Flights, a_late_rank_came_after_another_had_given_up) {
  expect_verdict("late", {"rank 1 entered #", "step 3, bucket 0: ", "later than rank", "had given up by then"});
}
TEST_P(Flights, a_rank_that_leaves_never_entered_the_first_bucket) {
  expect_verdict("leave", {"rank 1 never entered #", "step 3, bucket 0: ", "has left the job in order"});
}
TEST_P(Flights, an_exception_in_forward_ends_a_rank) {
  expect_verdict("throw_forward", {"rank 1 never entered #", "step 3, bucket 0: ", "is gone"});
}
TEST_P(Flights, an_exception_in_backward_ends_a_rank) {
  expect_verdict("throw_backward", {"rank 1 never entered #", "step 3, bucket ", "is gone"});
}
TEST_P(Flights, another_order_is_named) {
  expect_verdict("order", {"ranks called different operations as #",
                           "ranks 0, 2 called all_reduce(sum, 4 x Float), "
                           "step 3: loss",
                           "rank 1 called all_reduce(sum, 4 x Float), step 3: accuracy"});
}
TEST_P(Flights, another_size_is_named) {
  expect_verdict("size", {"ranks 0, 2 called all_reduce(sum, 4 x Float)", "rank 1 called all_reduce(sum, 5 x Float)"});
}
TEST_P(Flights, another_dtype_is_named) {
  expect_verdict("dtype", {"ranks 0, 2 called all_reduce(sum, 4 x Float)", "rank 1 called all_reduce(sum, 4 x Int)"});
}
TEST_P(Flights, another_reduction_is_named) {
  expect_verdict("maximum",
                 {"ranks 0, 2 called all_reduce(sum, 4 x Float)", "rank 1 called all_reduce(max, 4 x Float)"});
}
TEST_P(Flights, another_root_is_named) {
  expect_verdict("root",
                 {"ranks 0, 2 called broadcast(4 x Float, root 0)", "rank 1 called broadcast(4 x Float, root 2)"});
}
TEST_P(Flights, an_operation_left_out_is_named) {
  expect_verdict("skip", {"ranks 0, 2 called all_reduce(sum, 4 x Float), step 3: loss",
                          "rank 1 called all_reduce(sum, 4 x Float), step 3: accuracy"});
}
TEST_P(Flights, an_operation_in_addition_is_named) {
  expect_verdict("extra", {"ranks 0, 2 called all_reduce(sum, 4 x Float), step 3: accuracy",
                           "rank 1 called all_reduce(sum, 4 x Float), step 3: speed"});
}

TEST_P(Flights, a_step_that_was_given_up_is_a_remark) {
  const auto ended = fly("give_up");
  for (const auto& rank : ended) EXPECT_EQ(rank.code, 0) << rank.output;
  const auto sentences = verdict(read_flights({folder_.path()}));
  EXPECT_THAT(sentences.front(), HasSubstr("no rank waits for another; the last collective is #"));
  EXPECT_THAT(sentences.front(), HasSubstr("step 5, bucket "));
  ASSERT_GE(sentences.size(), 2U);
  EXPECT_EQ(sentences[1], "rank 1 gave up step 3");
}

INSTANTIATE_TEST_SUITE_P(Host, Flights, ::testing::Values("host"), [](const auto& info) { return info.param; });
INSTANTIATE_TEST_SUITE_P(Tcp, Flights, ::testing::Values("tcp"), [](const auto& info) { return info.param; });
INSTANTIATE_TEST_SUITE_P(Gloo, Flights, ::testing::Values("gloo"), [](const auto& info) { return info.param; });

// Records of a run without faults: one per collective, all finished, in the order of their numbers.
TEST(Flight, every_operation_begins_and_ends) {
  const TempFolder folder;
  const auto ended = run_together({{{FAULT_RANK, "none", "0"}, {{"SHOAL_FLIGHT_RECORDER", folder.path()}}}}, 40);
  ASSERT_EQ(ended[0].code, 0) << ended[0].output;
  const auto flight = read_flight(folder.path() / "rank-0.flight");
  EXPECT_EQ(flight.size, 1);
  EXPECT_GT(flight.left, 0);
  uint64_t number = 0;
  int buckets = 0;
  for (const auto& record : flight.records) {
    ASSERT_EQ(record.kind, FlightRecord::collective);
    EXPECT_EQ(record.print.number, ++number);
    EXPECT_LE(record.entered, record.issued);
    EXPECT_LE(record.issued, record.finished);
    buckets += record.print.bucket >= 0 ? 1 : 0;
  }
  EXPECT_GE(buckets, 6) << "a bucket in each of 6 steps";
}

TEST(Flight, other_files_are_refused_by_name) {
  const TempFolder folder;
  EXPECT_THROW(read_flights({folder.path()}), UsageError);
  std::FILE* file = std::fopen(folder.file("rank-0.flight").c_str(), "w");
  const std::vector<char> rubbish(flight_bytes, 'x');
  std::fwrite(rubbish.data(), 1, rubbish.size(), file);
  std::fclose(file);
  try {
    read_flights({folder.path()});
    FAIL() << "nothing was thrown";
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), HasSubstr("rank-0.flight is not a flight recorder's file of this version"));
  }
}

}  // namespace
}  // namespace shoal::test
