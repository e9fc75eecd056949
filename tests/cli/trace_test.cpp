// Traces of `shoal train --trace`, read as a viewer reads them.

#include <gmock/gmock.h>

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

#include "tests/cli/shoal_program.h"
#include "tests/support/temp_folder.h"

namespace shoal::test::trace_test {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

struct Stretch {
  std::string name;
  std::string what;
  int64_t step = -1;
  int64_t bucket = -1;
  double begin = 0;
  double end = 0;
};

// Events of one rank, by category; begin and end pairs are merged.
using Trace = std::map<std::string, std::vector<Stretch>>;

Trace parse(const json& file, int rank) {
  Trace trace;
  std::map<std::string, std::pair<std::string, Stretch>> open;
  for (const auto& event : file["traceEvents"]) {
    const std::string phase = event["ph"];
    if (phase == "M" || event["pid"] != rank) continue;
    const std::string category = event["cat"];
    const auto arguments = event.value("args", json::object());
    Stretch stretch{.name = event["name"],
                    .what = arguments.value("what", ""),
                    .step = arguments.value("step", int64_t{-1}),
                    .bucket = arguments.value("bucket", int64_t{-1}),
                    .begin = event["ts"],
                    .end = event["ts"]};
    if (phase == "X") stretch.end += event["dur"].get<double>();
    if (phase == "b") {
      EXPECT_TRUE(open.emplace(event["id"], std::pair(category, stretch)).second) << "two begin as " << event["id"];
      continue;
    }
    if (phase == "e") {
      const auto begun = open.find(event["id"]);
      if (begun == open.end()) {
        ADD_FAILURE() << event["id"] << " ends and has not begun";
        continue;
      }
      stretch = begun->second.second;
      stretch.end = event["ts"];
      open.erase(begun);
    }
    EXPECT_LE(stretch.begin, stretch.end) << event;
    trace[category].push_back(stretch);
  }
  EXPECT_TRUE(open.empty()) << open.size() << " collectives begin and do not end";
  return trace;
}

std::vector<Stretch> named(const std::vector<Stretch>& all, const std::string& name, int64_t step = -1) {
  std::vector<Stretch> found;
  for (const auto& one : all) {
    if (one.name == name && (step < 0 || one.step == step)) found.push_back(one);
  }
  return found;
}

void train(const TempFolder& folder, std::vector<std::string> options) {
  options.insert(options.begin(), {"train", "--data", "reference", "--trace", folder.path()});
  const auto ended = shoal(options);
  ASSERT_EQ(ended.code, 0) << ended.output;
}

TEST(Trace, buckets_leave_during_backward_and_every_collective_ends) {
  const TempFolder folder;
  train(folder,
        {"--model", "gpt", "--steps", "4", "--ranks", "2", "--bucket-cap-mb", "0.1", "--first-bucket-mb", "0.1"});
  for (const int rank : {0, 1}) {
    auto trace = parse(read(folder.file("rank-" + std::to_string(rank) + ".json")), rank);
    for (int64_t step = 0; step < 4; ++step) {
      const auto forward = named(trace["compute"], "forward", step);
      const auto backward = named(trace["compute"], "backward", step);
      const auto optimizer = named(trace["compute"], "optimizer", step);
      const auto reductions = named(trace["collective"], "all_reduce", step);
      ASSERT_EQ(forward.size(), 1U);
      ASSERT_EQ(backward.size(), 1U);
      ASSERT_EQ(optimizer.size(), 1U);
      EXPECT_LE(forward[0].end, backward[0].begin);
      EXPECT_LE(backward[0].end, optimizer[0].begin);
      ASSERT_GT(reductions.size(), 1U);
      for (const auto& reduction : reductions) {
        if (reduction.bucket < 0) continue;
        EXPECT_GT(reduction.begin, backward[0].begin) << reduction.what;
        EXPECT_LT(reduction.end, backward[0].end) << reduction.what;
        EXPECT_FALSE(reduction.what.empty());
      }
      EXPECT_LT(reductions.front().begin, backward[0].begin + 0.9 * (backward[0].end - backward[0].begin))
          << "the first bucket leaves before backward is through";
      double waited = 0;
      for (const auto& wait : named(trace["wait"], "all_reduce", step)) waited += wait.end - wait.begin;
      EXPECT_LT(waited, backward[0].end - backward[0].begin);
    }
  }
}

// Over Gloo parameters are pages; ranks of one host would read them from shared memory.
TEST(Trace, fsdp_gathers_are_ahead_of_use) {
  const TempFolder folder;
  train(folder, {"--model", "gpt", "--strategy", "fsdp", "--transport", "gloo", "--steps", "4", "--ranks", "2"});
  for (const int rank : {0, 1}) {
    auto trace = parse(read(folder.file("rank-" + std::to_string(rank) + ".json")), rank);
    const auto& uses = trace["unit"];
    const auto gathers = named(trace["collective"], "all_gather");
    const auto last_step = named(trace["compute"], "step", 3);
    ASSERT_EQ(last_step.size(), 1U);
    int used = 0;
    int ahead = 0;
    for (const auto& use : uses) {
      if (use.begin < last_step[0].begin || use.begin > last_step[0].end) continue;
      ++used;
      // The newest gather of this unit that had begun when the unit was used.
      const bool begun = std::any_of(gathers.begin(), gathers.end(), [&](const Stretch& gather) {
        return gather.what == use.name && gather.begin > last_step[0].begin && gather.begin < use.begin;
      });
      ahead += begun ? 1 : 0;
    }
    EXPECT_GE(used, 4) << "several units, forward and backward";
    EXPECT_GE(ahead, used - 2) << "of a step's uses only the first of a pass finds its unit not yet on the way";
  }
}

// When neighbours' values arrived, in one training.
struct Arrivals {
  int all = 0;
  int before_backward = 0;
  int under_forward = 0;
};

// Over sockets, where values are sent; ranks of one host read them from shared memory.
Arrivals arrivals_of_training() {
  const TempFolder folder;
  // The batch makes a forward long compared with the delays between ranks on a loaded machine.
  train(folder,
        {"--model", "gpt", "--strategy", "decentralized", "--topology", "ring", "--transport", "gloo", "--steps", "12",
         "--batch", "16", "--ranks", "2", "--bucket-cap-mb", "0.1", "--neighbour-timeout", "20"});
  Arrivals counted;
  for (const int rank : {0, 1}) {
    auto trace = parse(read(folder.file("rank-" + std::to_string(rank) + ".json")), rank);
    for (int64_t step = 1; step < 12; ++step) {
      const auto forward = named(trace["compute"], "forward", step);
      const auto backward = named(trace["compute"], "backward", step);
      const auto arrivals = named(trace["exchange"], "values", step);
      EXPECT_EQ(forward.size(), 1U);
      EXPECT_EQ(backward.size(), 1U);
      EXPECT_GT(arrivals.size(), 1U) << "several buckets";
      EXPECT_EQ(named(trace["compute"], "mix", step).size(), arrivals.size());
      if (testing::Test::HasFailure()) return counted;
      for (const auto& values : arrivals) {
        ++counted.all;
        EXPECT_LT(values.end, backward[0].end) << "what has been mixed was there";
        counted.before_backward += values.end < backward[0].begin ? 1 : 0;
        counted.under_forward += values.begin < forward[0].end && values.end > forward[0].begin ? 1 : 0;
      }
    }
  }
  return counted;
}

TEST(Trace, DEC04_neighbours_values_arrive_under_forward) {
  // The rank that is ahead waits for the other, which finds all values present: half of all are there when backward
  // begins. On a machine busy with other things ranks may run one after the other, with nothing under a forward; then
  // another training has to show it.
  Arrivals counted;
  for (int training = 0; training < 5 && !HasFailure(); ++training) {
    counted = arrivals_of_training();
    if (counted.before_backward > counted.all / 4 && counted.under_forward > 0) break;
  }
  EXPECT_GT(counted.before_backward, counted.all / 4) << "of " << counted.all << ", there when backward begins";
  EXPECT_GT(counted.under_forward, 0) << "of " << counted.all;
}

TEST(Trace, merged_traces_have_one_clock) {
  const TempFolder folder;
  train(folder, {"--model", "mlp", "--steps", "3", "--ranks", "3"});
  const auto ended = shoal({"trace", "merge", folder.path(), "-o", folder.file("job.json")});
  ASSERT_EQ(ended.code, 0) << ended.output;
  const auto merged = read(folder.file("job.json"));
  double first = 1e18;
  std::vector<Trace> ranks;
  for (int rank = 0; rank < 3; ++rank) {
    ranks.push_back(parse(merged, rank));
    for (const auto& [category, stretches] : ranks.back()) {
      for (const auto& stretch : stretches) first = std::min(first, stretch.begin);
    }
  }
  EXPECT_EQ(first, 0);
  // An all-reduce ends on no rank before it has begun on all.
  for (int64_t step = 0; step < 3; ++step) {
    double last_begin = 0;
    double first_end = 1e18;
    for (auto& trace : ranks) {
      const auto reductions = named(trace["collective"], "all_reduce", step);
      ASSERT_FALSE(reductions.empty());
      last_begin = std::max(last_begin, reductions.front().begin);
      first_end = std::min(first_end, reductions.front().end);
    }
    EXPECT_LT(last_begin, first_end) << "step " << step;
  }
}

TEST(Trace, a_run_leaves_no_traces_of_one_with_more_ranks) {
  const TempFolder folder;
  train(folder, {"--model", "mlp", "--steps", "2", "--ranks", "3"});
  train(folder, {"--model", "mlp", "--steps", "2", "--ranks", "2"});
  EXPECT_TRUE(std::filesystem::exists(folder.file("rank-1.json")));
  EXPECT_FALSE(std::filesystem::exists(folder.file("rank-2.json")));
}

TEST(Trace, merge_refuses_what_is_not_a_trace) {
  const TempFolder folder;
  auto ended = shoal({"trace", "merge", folder.path(), "-o", folder.file("job.json")});
  EXPECT_EQ(ended.code, 1);
  EXPECT_THAT(ended.output, HasSubstr("no rank-N.json there"));
  std::ofstream(folder.file("rank-0.json")) << "{\"traceEvents\": 3}";
  ended = shoal({"trace", "merge", folder.path(), "-o", folder.file("job.json")});
  EXPECT_EQ(ended.code, 1);
  EXPECT_THAT(ended.output, HasSubstr("rank-0.json is not a trace of one rank"));
}

TEST(Trace, merge_writes_nothing_that_the_next_merge_would_take_for_a_rank) {
  const TempFolder folder;
  train(folder, {"--model", "mlp", "--steps", "2", "--ranks", "2"});
  for (const auto& outputs : std::vector<std::vector<std::string>>{
           {"-o", folder.file("rank-9.json")}, {"-o", folder.file("job.json"), "--json", folder.file("rank-9.json")}}) {
    std::vector<std::string> line{"trace", "merge", folder.path()};
    line.insert(line.end(), outputs.begin(), outputs.end());
    const auto ended = shoal(line);
    EXPECT_EQ(ended.code, 1);
    EXPECT_THAT(ended.output, HasSubstr("rank-9.json: files of ranks have such names there"));
  }
  EXPECT_EQ(shoal({"trace", "merge", folder.path(), "-o", folder.file("job.json")}).code, 0);
}

}  // namespace
}  // namespace shoal::test::trace_test
