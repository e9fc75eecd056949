// `shoal topology` as a user calls it.

#include <gmock/gmock.h>

#include <algorithm>
#include <fstream>
#include <sstream>

#include "tests/cli/shoal_program.h"
#include "tests/support/temp_folder.h"

namespace shoal::test::topology_test {
namespace {

using ::testing::HasSubstr;

Ended topology(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "topology");
  return shoal(arguments);
}

size_t count(const std::string& text, const std::string& part) {
  size_t found = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

std::string text_of(const std::string& path) {
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

TEST(TopologyCommand, BEY13_prints_who_averages_with_whom_and_how_fast) {
  const auto ended = topology({"one-peer-exp", "--ranks", "4"});
  EXPECT_EQ(ended.code, 0);
  EXPECT_THAT(ended.output, HasSubstr("one-peer-exp, 4 ranks, doubly stochastic, 2 rounds, "));
  EXPECT_THAT(ended.output, HasSubstr("round 0\n     0.5: 0-1 2-3\n"));
  EXPECT_THAT(ended.output, HasSubstr("round 1\n     0.5: 0-2 1-3\n"));
  EXPECT_THAT(ended.output, HasSubstr("     1       .     0.5       .     0.5\n")) << "the matrix' second row";
  EXPECT_THAT(ended.output, HasSubstr("spectral gap                                        1\n"));
  EXPECT_THAT(ended.output, HasSubstr("all equal after                                     2 steps\n"));
  const auto directed = topology({"one-peer-exp", "--ranks", "3"});
  EXPECT_THAT(directed.output, HasSubstr("0.5: 2>0 0>1 1>2\n"));
  const auto odd = topology({"ring", "--ranks", "3"});
  EXPECT_THAT(odd.output, HasSubstr("    idle: 0\n"));
  EXPECT_THAT(odd.output, HasSubstr("all equal after                                     never\n"));
  EXPECT_THAT(topology({"random", "--ranks", "4", "--seed", "2"}).output, HasSubstr("and 48 more rounds (--json)"));
}

TEST(TopologyCommand, BEY13_lists_the_names) {
  const auto ended = topology({"--list"});
  EXPECT_EQ(ended.code, 0);
  EXPECT_EQ(count(ended.output, "\n"), 11U);
  EXPECT_THAT(ended.output, HasSubstr("alternating-exp-ring  hosts average inside"));
}

TEST(TopologyCommand, BEY13_what_json_says_is_a_file_that_can_be_given) {
  const TempFolder folder;
  for (const auto& [name, ranks] : {std::pair("alternating-exp-ring", "6"), std::pair("one-peer-exp", "5"),
                                    std::pair("base-2", "3"), std::pair("star", "1")}) {
    ASSERT_EQ(topology({name, "--ranks", ranks, "--json", folder.file("out.json")}).code, 0);
    const auto out = read(folder.file("out.json"));
    std::ofstream(folder.file(std::string(name) + ".json")) << out["file"];
    const auto again = topology({"--file", folder.file(std::string(name) + ".json"), "--ranks", ranks, "--json", "-"});
    ASSERT_EQ(again.code, 0) << again.output;
    EXPECT_EQ(nlohmann::json::parse(again.output), out);
  }
  const auto report = nlohmann::json::parse(
      topology({"alternating-exp-ring", "--ranks", "8", "--local-size", "4", "--json", "-"}).output)["report"];
  EXPECT_EQ(report["period"], 2);
  EXPECT_EQ(report["exact_after"], 2);
  EXPECT_EQ(report["mean_sent"], 5);  // 3, then 7
  EXPECT_EQ(report["most_sent"], 7);
  EXPECT_EQ(report["spectral_gap"], 1);
}

TEST(TopologyCommand, BEY13_drawings_are_well_formed_and_show_every_edge) {
  const TempFolder folder;
  const auto page = folder.file("page.html"), picture = folder.file("picture.svg");
  const std::string parse = "import sys, xml.dom.minidom; [xml.dom.minidom.parse(f) for f in sys.argv[1:]]";
  ASSERT_EQ(topology({"ring", "--ranks", "6", "--html", page, "--svg", picture}).code, 0);
  const auto parsed = run({PYTHON, "-c", parse, page, picture}, 20);
  EXPECT_EQ(parsed.code, 0) << parsed.output;
  for (const auto& file : {page, picture}) {
    const auto text = text_of(file);
    EXPECT_EQ(count(text, "class=\"edge\""), 6U) << file;  // both rounds
    EXPECT_EQ(count(text, "marker-end"), 0U) << file;
    EXPECT_EQ(count(text, " keeps 0.5<"), 12U) << file;
    EXPECT_THAT(text, HasSubstr("<title>0 and 5: 0.5</title>"));
  }
  EXPECT_THAT(text_of(page), HasSubstr("<td class=\"words\">spectral gap</td><td>0.5</td>"));
  ASSERT_EQ(topology({"one-peer-exp", "--ranks", "5", "--svg", picture}).code, 0);
  EXPECT_EQ(count(text_of(picture), "marker-end"), 15U) << "arrows";
  ASSERT_EQ(topology({"exp", "--ranks", "40", "--svg", picture}).code, 0);
  EXPECT_EQ(count(text_of(picture), "fill-opacity"), 40U * 7) << "a matrix: own weights and 6 distances";
}

TEST(TopologyCommand, BEY13_refuses_what_makes_no_sense) {
  const auto refusal = [](const std::vector<std::string>& arguments) {
    const auto ended = topology(arguments);
    EXPECT_EQ(ended.code, 2) << ended.output;
    EXPECT_EQ(count(ended.output, "\n"), 1U) << ended.output;
    return ended.output;
  };
  EXPECT_THAT(refusal({}), HasSubstr("give the name of a topology or --file FILE"));
  EXPECT_THAT(refusal({"ring"}), HasSubstr("topology ring: give --ranks N"));
  EXPECT_THAT(refusal({"rign", "--ranks", "4"}), HasSubstr("unknown topology 'rign': choose one of complete, ring"));
  EXPECT_THAT(refusal({"ring", "--ranks", "0"}), HasSubstr("0 ranks; give at least 1"));
  EXPECT_THAT(refusal({"ring", "--ranks", "4", "--local-size", "3"}), HasSubstr("give a multiple of 3"));
  EXPECT_THAT(refusal({"ring", "--file", "x.json"}), HasSubstr("give the name of a topology or --file"));
  EXPECT_THAT(refusal({"--file", "x.json", "--seed", "1"}), HasSubstr("--seed is for named topologies"));
  EXPECT_THAT(refusal({"ring", "--ranks", "4", "--seed", "1"}),
              HasSubstr("--seed is for topology random, not for ring"));
  for (const auto& more : std::vector<std::vector<std::string>>{{"ring"},
                                                                {"--ranks", "-7"},
                                                                {"--html", "x.html"},
                                                                {"--svg", "x.svg"},
                                                                {"--file", "x.json"},
                                                                {"--seed", "1"}}) {
    std::vector<std::string> line{"--list"};
    line.insert(line.end(), more.begin(), more.end());
    EXPECT_THAT(refusal(line), HasSubstr("--list takes no other option than --json, and no name"));
  }
  EXPECT_THAT(refusal({"ring", "--ranks", "4", "--html", "-"}), HasSubstr("--html -: it does not go to"));
  EXPECT_THAT(refusal({"ring", "--ranks", "4", "--svg", "-"}), HasSubstr("--svg -: it does not go to"));
  EXPECT_THAT(refusal({"--file", "/nowhere/x.json"}), HasSubstr("cannot open /nowhere/x.json: No such file"));
}

TEST(TopologyCommand, BEY13_no_output_replaces_another_or_the_file_that_is_read) {
  const TempFolder folder;
  const auto file = folder.file("topology.json"), one = folder.file("one");
  const std::string text = R"({"ranks": 2, "rounds": [{"groups": [[0, 1]]}]})";
  std::ofstream(file) << text;
  const std::vector<std::string> outputs{"--html", "--svg", "--json"};
  for (const auto& output : outputs) {
    const auto ended = topology({"--file", file, output, file});
    EXPECT_EQ(ended.code, 2) << ended.output;
    EXPECT_THAT(ended.output, HasSubstr(output + ": cannot write " + file + ": the command reads"));
    for (const auto& other : outputs) {
      if (other == output) continue;
      const auto both = topology({"ring", "--ranks", "4", output, one, other, one});
      EXPECT_EQ(both.code, 2) << both.output;
      EXPECT_THAT(both.output, HasSubstr("give two files"));
    }
  }
  EXPECT_EQ(text_of(file), text);
}

}  // namespace
}  // namespace shoal::test::topology_test
