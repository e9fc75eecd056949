// What a run says of ranks that have died in it: in its metrics file, in `shoal report` and `shoal top`, and in the
// flight recorder.

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/elastic/elastic_run.h"
#include "tests/support/temp_folder.h"

namespace shoal::elastic_told_test {
namespace {

using nlohmann::json;

std::string text_of(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

json of_program(const std::vector<std::string>& arguments, const std::string& file) {
  std::vector<std::string> line{SHOAL};
  line.insert(line.end(), arguments.begin(), arguments.end());
  const auto ended = test::run(line, 60);
  EXPECT_EQ(ended.code, 0) << ended.output;
  return json::parse(text_of(file));
}

// Rank 0 dies, and then rank 2, which is rank 1 by then.
TEST(ElasticTold, ELA11_metrics_report_top_and_flight_recorder_tell_who_died_and_what_it_cost) {
  const test::TempFolder folder;
  const auto metrics = folder.file("metrics.jsonl");
  std::ofstream(metrics) << R"({"step":0,"seconds":0.5,"loss":2.5,"step_ms":5,"samples":12})"
                         << "\n";
  WorldOptions world;
  world.flight_recorder = folder.path();
  const test::SharedRecord record;
  const std::vector<test::Death> deaths{{0, test::Moment::in_backward, 3}, {2, test::Moment::in_backward, 6}};
  const auto ended = test::run_ranks(
      3, [&](const World& ranks) { return test::train(ranks, *record, 1, deaths, {.metrics = metrics}); }, {}, world);
  EXPECT_EQ(ended[1].text, "");
  std::ofstream(metrics, std::ios::app) << R"({"step":9,"seconds":1,"loss":0.5,"step_ms":5,"samples":60})"
                                        << "\n";

  const auto check = [](const json& events) {
    ASSERT_EQ(events.size(), 2U);
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_GT(events[i]["generation"], i == 0 ? json(1) : events[0]["generation"]);
      EXPECT_EQ(events[i]["finished_step"], 0);
      EXPECT_EQ(events[i]["ranks"], 2 - i);
      EXPECT_EQ(events[i]["step"], i == 0 ? 2 : 5);  // the last complete one
      EXPECT_GT(events[i]["recovery_ms"].get<double>(), 0);
      EXPECT_LT(events[i]["recovery_ms"].get<double>(), 30'000);
    }
    for (const auto& event : events) {
      EXPECT_NE(event["event"].get<std::string>().find(" ms later; every rank has all parameters"), std::string::npos);
    }
    EXPECT_EQ(events[0]["event"].get<std::string>().find("rank 0 has ended; 2 ranks go on after step 2"), 0U);
    EXPECT_EQ(events[1]["event"].get<std::string>().find(
                  "rank 1 (number 2 of the launcher) has ended; 1 rank goes on after step 5"),
              0U);
  };
  json lines = json::array();
  std::ifstream file(metrics);
  for (std::string line; std::getline(file, line);) {
    const auto one = json::parse(line);
    if (one.contains("event")) lines.push_back(one);
  }
  check(lines);
  EXPECT_EQ(lines[0]["lost"], json::array({0}));
  EXPECT_EQ(lines[1]["lost"], json::array({2}));

  const auto page = folder.file("report.html");
  const auto report =
      of_program({"report", folder.path(), "-o", page, "--json", folder.file("r.json")}, folder.file("r.json"));
  check(report["runs"][0]["events"]);
  EXPECT_FALSE(report["runs"][0]["metrics"].contains("recovery_ms")) << "no metric of a step";
  EXPECT_NE(text_of(page).find("rank 1 (number 2 of the launcher) has ended"), std::string::npos);

  const auto top = of_program({"top", folder.path(), "--json", folder.file("t.json")}, folder.file("t.json"));
  check(top["events"]);
  EXPECT_EQ(top["metrics"]["step"], 9);
  EXPECT_NEAR(top["metrics"]["samples_per_second"].get<double>(), 96, 1e-6);
  EXPECT_NE(test::run({SHOAL, "top", folder.path()}, 60).output.find("after step 2: rank 0 has ended"),
            std::string::npos);

  const auto flight = test::run({SHOAL, "flight", folder.path()}, 60);
  EXPECT_NE(flight.output.find("rank 0 has ended; 2 ranks go on"), std::string::npos) << flight.output;
  EXPECT_NE(flight.output.find("every rank has all parameters and their state"), std::string::npos) << flight.output;
}

// The 745 elements of the net are divided among 3 ranks, and then among 2.
TEST(ElasticTold, ELA11_it_says_who_updates_the_share_of_a_rank_that_has_ended) {
  const test::TempFolder folder;
  const auto metrics = folder.file("metrics.jsonl");
  const test::SharedRecord record;
  const auto ended = test::run_ranks(3, [&](const World& world) {
    return test::train(world, *record, 1, {{1, test::Moment::in_backward, 3}}, {.metrics = metrics},
                       {test::Sharding::fsdp, "adamw"});
  });
  EXPECT_EQ(ended[0].text, "");
  const auto event = json::parse(text_of(metrics));
  const auto text = event["taken_over"].get<std::string>();
  int now = 0;
  int before = 0;
  const auto* form = "the others update its share of the parameters: rank 0 updates %d elements, and updated %d";
  ASSERT_EQ(std::sscanf(text.c_str(), form, &now, &before), 2) << text;
  EXPECT_NEAR(now, 745 / 2, 16) << "shares end where cache lines do";
  EXPECT_NEAR(before, 745 / 3, 16);
  EXPECT_NE(event["event"].get<std::string>().find(" ms later; " + text), std::string::npos);
}

}  // namespace
}  // namespace shoal::elastic_told_test
