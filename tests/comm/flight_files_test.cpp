// Flight recorder files that are damaged or made by somebody else.

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstddef>
#include <cstring>
#include <fstream>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <sstream>

#include "base/rank_list.h"
#include "comm/telemetry/flight_recorder.h"
#include "comm/telemetry/verdict.h"
#include "shoal/world.h"
#include "tests/support/refusal.h"
#include "tests/support/temp_folder.h"

namespace shoal::test::flight_files_test {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;

class FlightFiles : public ::testing::Test {
 protected:
  void SetUp() override {
    FlightRecorder recorder(folder_.path(), 0, 2);
    const int group = recorder.add_group("world", {0, 1}, {});
    Call call;
    call.op = Op::all_reduce;
    call.inputs = {at::ones({4})};
    for (uint64_t number = 0; number < 5; ++number) {
      recorder.enter(FlightRecord::collective, group, call, number);
    }
    std::ifstream file(path_, std::ios::binary);
    good_.assign(std::istreambuf_iterator<char>(file), {});
  }
  void write(const std::string& bytes) { std::ofstream(path_, std::ios::binary | std::ios::trunc) << bytes; }

  template <class Value>
  std::string refusal_with(size_t place, const Value& value) {
    auto bytes = good_;
    std::memcpy(bytes.data() + place, &value, sizeof value);
    write(bytes);
    const auto said = refusal([&] { verdict(read_flights({path_})); });
    EXPECT_THAT(said, HasSubstr("rank-0.flight"));
    return said;
  }

  TempFolder folder_;
  std::string path_ = folder_.file("rank-0.flight");
  std::string good_;
};

TEST_F(FlightFiles, have_the_size_that_the_documents_say) {
  EXPECT_EQ(good_.size(), flight_bytes);
  std::stringstream text;
  text << std::ifstream(DOCS "/telemetry.md").rdbuf();
  EXPECT_THAT(text.str(),
              HasSubstr(fmt::format("Each file takes {},{:03} bytes", flight_bytes / 1000, flight_bytes % 1000)));
}

TEST_F(FlightFiles, a_file_that_is_given_twice_is_read_once) {
  EXPECT_EQ(read_flights({folder_.path(), path_, folder_.path()}).size(), 1U);
}

// The clock was set back after the earlier job, which had more ranks.
TEST_F(FlightFiles, the_newest_job_of_a_host_is_that_by_its_steady_clock) {
  auto bytes = good_;
  const int64_t ahead = 86'400'000'000'000;
  int64_t epoch = 0;
  std::memcpy(&epoch, bytes.data() + offsetof(FlightHeader, epoch_ns), sizeof epoch);
  epoch += ahead;
  std::memcpy(bytes.data() + offsetof(FlightHeader, epoch_ns), &epoch, sizeof epoch);
  const int64_t left = 1;
  std::memcpy(bytes.data() + offsetof(FlightHeader, left), &left, sizeof left);
  const int32_t rank = 1;
  std::memcpy(bytes.data() + offsetof(FlightHeader, rank), &rank, sizeof rank);
  std::ofstream(folder_.file("rank-1.flight"), std::ios::binary) << bytes;
  std::optional<FlightRecorder> present(std::in_place, folder_.path(), 0, 1);
  const int group = present->add_group("world", {0}, {});
  Call call;
  call.op = Op::all_reduce;
  call.inputs = {at::ones({4})};
  present->join({this_process()});
  present->enter(FlightRecord::collective, group, call, 0);
  EXPECT_EQ(read_flights({folder_.path()}).front().size, 1) << "it runs";
  present.reset();
  EXPECT_EQ(read_flights({folder_.path()}).front().size, 1) << "it was the last one";
}

TEST_F(FlightFiles, what_cannot_be_is_refused) {
  EXPECT_NO_THROW(verdict(read_flights({path_})));
  EXPECT_THAT(refusal_with(offsetof(FlightHeader, size), std::numeric_limits<int32_t>::max()),
              HasSubstr("the file says 2147483647 ranks; valid are 1 to 100000"));
  EXPECT_THAT(refusal_with(offsetof(FlightHeader, size), -5), HasSubstr("the file says -5 ranks"));
  EXPECT_THAT(refusal_with(offsetof(FlightHeader, rank), 2), HasSubstr("the file says rank 2 of 2"));
  EXPECT_THAT(refusal_with(offsetof(FlightHeader, epoch_ns), std::numeric_limits<int64_t>::max()),
              HasSubstr("an invalid time"));
  constexpr auto groups = offsetof(FlightHeader, tables) + offsetof(FlightGroups, text);
  EXPECT_THAT(refusal_with(groups, std::to_array("0\tworld\t0-2147483647")), HasSubstr("rank -1 in group"));
  EXPECT_THAT(refusal_with(groups, std::to_array("0\tworld\t0-9/0")), HasSubstr("rank -1 in group"));
  EXPECT_THAT(refusal_with(groups, std::to_array("0\tworld\t0,9\n")), HasSubstr("rank 9 in group"));
  EXPECT_THAT(refusal_with(groups, std::to_array("0\tworld\t1,1\n")), HasSubstr("rank 1 in group"));
  const auto record = sizeof(FlightHeader);
  EXPECT_THAT(refusal_with(record + offsetof(FlightRecord, print) + offsetof(Fingerprint, dtype), 1000),
              HasSubstr("a record with an unknown operation"));
  EXPECT_THAT(refusal_with(record + offsetof(FlightRecord, kind), 17), HasSubstr("unknown operation"));
  EXPECT_THAT(refusal_with(record + offsetof(FlightRecord, finished), int64_t{-1}), HasSubstr("an invalid time"));
  write(good_.substr(0, 1000));
  EXPECT_THAT(refusal([&] { read_flight(path_); }), HasSubstr("1000 bytes instead of"));
}

TEST(RankList, is_short_and_can_be_read_again) {
  EXPECT_EQ(rank_list({0, 1}), "0,1");
  EXPECT_EQ(rank_list({0, 1, 2, 3, 7, 9, 11, 5, 4}), "0-3,7-11/2,5,4");
  std::vector<int> all(2048);
  std::iota(all.begin(), all.end(), 0);
  EXPECT_EQ(rank_list(all), "0-2047");
  for (const auto& ranks : {all, {5}, {0, 8, 16, 24, 25}, {3, 2, 1, 0}, {0, 1, 3, 5, 6, 7}}) {
    EXPECT_EQ(parse_rank_list(rank_list(ranks), 2048), ranks);
  }
  for (const auto* none : {"0-2048", "0-2147483647", "1-0", "0-9/0", "-1", "0,x"}) {
    EXPECT_EQ(parse_rank_list(none, 2048).back(), -1) << none;
  }
}

// Two ranks whose recorders have made many groups before; rank 0 waits in the last one.
class ManyGroups : public ::testing::Test {
 protected:
  static constexpr int many = 4000;
  // users: of the groups before, which live on if kept.
  std::vector<std::string> wait_after(bool kept, bool also_on_rank_1) {
    const TempFolder folder;
    std::vector<std::shared_ptr<int>> users;
    Call call;
    call.op = Op::all_reduce;
    call.inputs = {at::ones({4})};
    const ProcessId self = this_process();
    FlightRecorder waits(folder.path(), 0, 2);
    FlightRecorder absent(folder.path(), 1, 2);
    for (auto* recorder : {&waits, &absent}) {
      recorder->join({self, self});
      const auto live = users.emplace_back(std::make_shared<int>());
      const int first = recorder->add_group("world", {0, 1}, live);
      for (int i = 0; i < many && (recorder == &waits || also_on_rank_1); ++i) {
        auto user = std::make_shared<int>();
        recorder->add_group(fmt::format("world[0,1]#{}", i), {0, 1}, user);
        if (kept) users.push_back(std::move(user));
      }
      const int last = recorder->add_group(fmt::format("world[0,1]#{}", many), {0, 1}, live);
      recorder->finished(recorder->enter(FlightRecord::collective, first, call, 0));
      recorder->finished(recorder->enter(FlightRecord::collective, last, call, 0));
      if (recorder == &waits) recorder->enter(FlightRecord::collective, last, call, 1);
    }
    const auto flights = read_flights({folder.path()});
    for (const auto& flight : flights) EXPECT_EQ(flight.groups.front().name, "world") << "it is in use";
    return verdict(flights);
  }
};

TEST_F(ManyGroups, those_that_have_gone_make_room_for_the_next) {
  for (const bool both : {true, false}) {
    EXPECT_THAT(wait_after(/*kept=*/false, both).front(),
                AllOf(HasSubstr("rank 1 has not entered #1 all_reduce(sum, 4 x Float) of group 'world[0,1]#4000'"),
                      HasSubstr("rank 0 waited for it")));
  }
}

TEST_F(ManyGroups, without_room_the_report_says_that_a_rank_waits_and_blames_nobody) {
  EXPECT_EQ(
      wait_after(/*kept=*/true, /*also_on_rank_1=*/true).front(),
      "rank 0 has not finished #1 all_reduce(sum, 4 x Float), of a group that the flight recorder had no room for: "
      "for whom it waits is unknown");
  EXPECT_THAT(wait_after(/*kept=*/true, /*also_on_rank_1=*/false),
              Contains(HasSubstr("rank 0 has not finished #1 all_reduce(sum, 4 x Float), of a group that")));
}

TEST_F(ManyGroups, of_a_job_that_have_ended_make_room_for_its_next) {
  const TempFolder folder;
  const auto world = init({.rank = 0, .size = 1, .flight_recorder = folder.path()});
  const auto kept = world.group().subgroup({0});
  for (int i = 0; i < many; ++i) world.group().subgroup({0});
  auto tensor = at::ones({4});
  world.group().subgroup({0}).all_reduce(tensor).wait();
  kept.all_reduce(tensor).wait();
  const auto flight = read_flight(folder.file("rank-0.flight"));
  const auto name_of = [&](size_t back) { return flight.groups.at(flight.records.at(back).group).name; };
  ASSERT_EQ(flight.records.size(), 2U);
  EXPECT_EQ(name_of(0), "world[0]#4001");
  EXPECT_EQ(name_of(1), "world[0]#0") << "it is in use";
}

TEST_F(FlightFiles, a_named_pipe_is_refused_at_once) {
  ASSERT_EQ(mkfifo(folder_.file("rank-1.flight").c_str(), 0600), 0);
  EXPECT_THAT(refusal([&] { read_flights({folder_.path()}); }),
              AllOf(HasSubstr("rank-1.flight"), HasSubstr("is not a regular file")));
}

TEST_F(FlightFiles, every_damaged_file_is_refused_or_gives_a_verdict) {
  std::mt19937_64 random(3);
  int refused = 0;
  constexpr int mutations = 2000;
  for (int i = 0; i < mutations; ++i) {
    auto bytes = good_;
    // In the header, the groups' text, or the first records.
    const size_t places[] = {random() % offsetof(FlightHeader, tables), offsetof(FlightHeader, tables) + random() % 20,
                             sizeof(FlightHeader) + random() % (6 * sizeof(FlightRecord))};
    const auto value = random() >> (random() % 64);
    std::memcpy(bytes.data() + places[random() % 3], &value, 1 + random() % 8);
    write(bytes);
    try {
      EXPECT_FALSE(verdict(read_flights({path_})).empty());
    } catch (const UsageError&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, mutations / 10);
}

}  // namespace
}  // namespace shoal::test::flight_files_test
