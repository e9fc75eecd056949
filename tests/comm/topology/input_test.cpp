// Invalid topologies, and what their errors name.

#include <gmock/gmock.h>

#include <fstream>
#include <sstream>

#include "shoal/error.h"
#include "tests/comm/topology/dense.h"
#include "tests/support/refusal.h"
#include "tests/support/temp_folder.h"

namespace shoal::test::input_test {
namespace {

using ::testing::HasSubstr;

// In the second of two rounds, so that the error's round number is checked, too.
std::string refusal_of(const RoundSpec& spec, Stochastic kind = Stochastic::doubly) {
  return refusal([&] { Topology("mine", 3, kind, {{.groups = {{0, 1, 2}}}, spec}); });
}

TEST(TopologyInput, BEY13_a_round_that_is_wrong_is_named_with_rank_or_edge) {
  const auto begin = std::string("topology mine, round 1: ");
  EXPECT_EQ(refusal_of({.groups = {{0, 1}, {1, 2}}}), begin + "rank 1 is in two groups, or twice in one");
  EXPECT_EQ(refusal_of({.groups = {{0, 0}, {1, 2}}}), begin + "rank 0 is in two groups, or twice in one");
  EXPECT_EQ(refusal_of({.groups = {{0, 2}}}), begin + "rank 1 is in no group: give it a group of its own if it idles");
  EXPECT_EQ(refusal_of({.groups = {{0, 3}, {1, 2}}}), begin + "rank 3 in a group: ranks are 0 to 2");
  EXPECT_EQ(refusal_of({.groups = {{0, 1, 2}, {}}}), begin + "a group is empty");
  EXPECT_EQ(refusal_of({.groups = {{0, 1, 2}}, .weight = 1.5}), begin + "weight 1.5: give one from 0 to 1");
  EXPECT_EQ(refusal_of({.links = {{0, 1}, {1, -1}}}), begin + "rank -1 in link 1 - -1: ranks are 0 to 2");
  EXPECT_THAT(refusal_of({.links = {{0, 1}, {1, 2}, {1, 0}}}), HasSubstr("occurs twice"));
  EXPECT_EQ(refusal_of({.links = {{0, 1}}}), begin + "rank 2 has no edge: name it in idle if that is meant");
  EXPECT_EQ(refusal_of({.links = {{0, 1}}, .idle = {2, 2}}), begin + "rank 2 is twice in idle");
  EXPECT_EQ(refusal_of({.links = {{0, 1}}, .idle = {1, 2}}), begin + "rank 1 is in idle, but has edges");
  EXPECT_EQ(refusal_of({}), begin + "rank 0 has no edge: name it in idle if that is meant");
  EXPECT_EQ(refusal_of({.edges = {{0, 1, 0.5}, {0, 1, 0.5}}, .idle = {2}}), begin + "edge 0 -> 1 occurs twice");
  EXPECT_EQ(refusal_of({.edges = {{0, 0, 0.5}}}),
            begin + "edge 0 -> 0: a rank has no edge to itself; give its own weight in `self`");
  EXPECT_EQ(refusal_of({.edges = {{0, 7, 0.5}}}), begin + "rank 7 in edge 0 -> 7: ranks are 0 to 2");
  for (const double weight : {0.0, -0.5, 1.5, std::nan("")}) {
    EXPECT_THAT(refusal_of({.edges = {{0, 1, weight}}}), HasSubstr("edge 0 -> 1 has weight"));
  }
  EXPECT_THAT(refusal_of({.groups = {{0, 1, 2}}, .links = {{0, 1}}}), HasSubstr("one of groups, links and edges"));
  EXPECT_THAT(refusal_of({.links = {{0, 1}, {1, 2}}, .self = {1, 1, 1}}), HasSubstr("self is for edges"));
  EXPECT_THAT(refusal_of({.groups = {{0, 1}, {2}}, .idle = {2}}), HasSubstr("a group of one"));
  EXPECT_THAT(refusal_of({.weight = 0.5, .links = {{0, 1}, {1, 2}}}), HasSubstr("weight is for groups"));
}

TEST(TopologyInput, BEY13_sums_are_proven_as_declared) {
  const std::vector<Edge> circle{{0, 1, 0.5}, {1, 2, 0.5}, {2, 0, 0.25}};
  EXPECT_THAT(refusal_of({.edges = circle}), HasSubstr("round 1: the weights out of rank 0 sum to 1.25 instead of 1"));
  EXPECT_NO_THROW(Topology("mine", 3, Stochastic::row, {{.edges = circle}}));
  EXPECT_NO_THROW(Topology("mine", 3, Stochastic::column, {{.edges = circle}}));
  EXPECT_THAT(refusal_of({.edges = circle, .self = {0.5, 0.5, 0.5}}, Stochastic::row),
              HasSubstr("the weights into rank 0 sum to 0.75 instead of 1"));
  EXPECT_THAT(refusal_of({.edges = circle, .self = {0.5, 0.5, 0.5}}, Stochastic::column),
              HasSubstr("the weights out of rank 2 sum to 0.75 instead of 1"));
  EXPECT_THAT(refusal_of({.edges = {{0, 1, 0.75}, {2, 1, 0.75}}, .self = {}}, Stochastic::row),
              HasSubstr("the weights into rank 1 sum to 1.5 instead of 1"));
  EXPECT_THAT(refusal_of({.edges = circle, .self = {0.5, 0.5}}, Stochastic::row), HasSubstr("2 weights for 3 ranks"));
  EXPECT_THAT(refusal_of({.edges = circle, .self = {0.75, 0.5, 1.5}}, Stochastic::row),
              HasSubstr("rank 2 has the own weight 1.5"));
  // A deviation of 1e-9 is accepted and corrected.
  const Topology near("mine", 2, Stochastic::doubly,
                      {{.edges = {{0, 1, 0.5}, {1, 0, 0.5}}, .self = {0.5 + 5e-10, 0.5}}});
  EXPECT_EQ(near.round(0).self(0), 0.5);
  EXPECT_THROW(
      Topology("mine", 2, Stochastic::doubly, {{.edges = {{0, 1, 0.5}, {1, 0, 0.5}}, .self = {0.5 + 2e-9, 0.5}}}),
      UsageError);
}

TEST(TopologyInput, BEY13_values_reach_everybody_or_it_is_said_whose_do_not) {
  EXPECT_EQ(refusal([] {
              Topology("mine", 4, Stochastic::doubly, {{.groups = {{0, 1}, {2, 3}}}});
            }),
            "topology mine: the values of ranks 0, 1 never reach ranks 2, 3 over the 1 round(s)");
  EXPECT_NO_THROW(
      Topology("mine", 4, Stochastic::doubly, {{.groups = {{0, 1}, {2, 3}}}, {.groups = {{0, 2}, {1}, {3}}}}));
  EXPECT_EQ(refusal([] {
              Topology("mine", 3, Stochastic::row, {{.edges = {{1, 0, 0.5}, {1, 2, 0.5}, {2, 1, 0.5}}}});
            }),
            "topology mine: the values of rank 0 never reach ranks 1, 2 over the 1 round(s)");
  EXPECT_EQ(refusal([] {
              Topology("mine", 3, Stochastic::row, {{.edges = {{0, 1, 0.5}, {1, 0, 0.5}, {0, 2, 0.5}}}});
            }),
            "topology mine: the values of rank 2 never reach ranks 0, 1 over the 1 round(s)");
  // Two ranks that swap values forever are connected, but never agree; three with one that keeps a part do.
  EXPECT_THAT(refusal([] {
                Topology("mine", 2, Stochastic::doubly, {{.groups = {{0, 1}}, .weight = 0}});
              }),
              HasSubstr("values move from rank to rank but never mix"));
  EXPECT_NO_THROW(Topology("mine", 3, Stochastic::row, {{.edges = {{0, 1, 1}, {1, 2, 1}, {2, 0, 0.5}}}}));
}

TEST(TopologyInput, BEY13_names_and_sizes) {
  const auto unknown = refusal([] { make_topology("rign", 4); });
  EXPECT_THAT(unknown, HasSubstr("unknown topology 'rign': choose one of complete, ring, one-peer-exp"));
  EXPECT_THAT(unknown, HasSubstr("random"));
  EXPECT_THAT(refusal([] { make_topology("ring", 0); }), HasSubstr("0 ranks; give at least 1"));
  EXPECT_THAT(refusal([] { make_topology("ring", -2); }), HasSubstr("-2 ranks; give at least 1"));
  EXPECT_THAT(refusal([] { make_topology("ring", 4, 0); }), HasSubstr("hosts of 0 ranks"));
  EXPECT_EQ(refusal([] { make_topology("alternating-exp-ring", 8, 3); }),
            "topology alternating-exp-ring: 8 ranks cannot be divided into hosts of 3; give a multiple of 3");
  EXPECT_THAT(refusal([] {
                make_topology("ring", {.size = 4, .hosts = {2, 1}});
              }),
              HasSubstr("hosts of 2, 1 ranks do not make 4"));
  EXPECT_THAT(refusal([] { Topology("mine", 3, Stochastic::doubly, {}); }), HasSubstr("it has no rounds"));
  EXPECT_THAT(refusal([] { make_topology("ring", 4).round(-1); }), HasSubstr("round -1"));
}

TEST(TopologyInput, DEC06_users_register_topologies) {
  const auto line = [](const TopologyRequest& request) {
    if (request.size % 2 == 0) throw UsageError("a line has a middle: possible are odd sizes");
    RoundSpec spec;
    for (int rank = 0; rank + 1 < request.size; ++rank) spec.links.emplace_back(rank, rank + 1);
    return Topology("whatever", request.size, Stochastic::doubly, {spec});
  };
  register_topology("line", line, "neighbours in a row");
  const auto topology = make_topology("line", 5);
  EXPECT_EQ(topology.name(), "line");
  EXPECT_EQ(topology.round(0).sources(4), (std::vector<Neighbour>{{3, 1.0 / 3}}));
  EXPECT_EQ(known_topologies().back(), (std::pair<std::string, std::string>("line", "neighbours in a row")));
  EXPECT_THAT(refusal([] { make_topology("line", 4); }), HasSubstr("possible are odd sizes"));
  EXPECT_EQ(topology.without({3, 4}).fingerprint(), make_topology("line", 3).fingerprint());
  // The factory refuses four, which keep the links that they have among the five.
  const auto four = topology.without({4});
  EXPECT_EQ(four.size(), 4);
  EXPECT_DOUBLE_EQ(four.round(0).self(3), 2.0 / 3);
  EXPECT_THAT(refusal([&] { register_topology("line", line); }), HasSubstr("the name 'line' is taken"));
  EXPECT_THAT(refusal([&] { register_topology("ring", line); }), HasSubstr("the name 'ring' is taken"));
  EXPECT_THAT(refusal([&] { register_topology("", line); }), HasSubstr("give a name"));
  register_topology("three", [](const TopologyRequest&) { return make_topology("ring", 3); });
  EXPECT_THAT(refusal([] { make_topology("three", 4); }), HasSubstr("created a topology for 3 ranks instead of 4"));
}

// The example of docs/topologies.md.
std::string example() {
  std::ifstream file(DOCS "/topologies.md");
  std::stringstream text;
  text << file.rdbuf();
  const auto begin = text.str().find("```json\n");
  if (begin == std::string::npos) return "";
  return text.str().substr(begin + 8, text.str().find("```", begin + 8) - begin - 8);
}

class TopologyFile : public ::testing::Test {
 protected:
  std::string write(const std::string& text) {
    std::ofstream(path_) << text;
    return path_;
  }
  // Error for the example after `part` of it is replaced.
  std::string mutated(const std::string& part, const std::string& by) {
    auto text = example();
    const auto at = text.find(part);
    if (at == std::string::npos) return "the example has no " + part;
    const auto said = refusal([&] { read_topology(write(text.replace(at, part.size(), by))); });
    EXPECT_THAT(said, HasSubstr("topology file " + path_ + ": "));
    return said;
  }

  TempFolder folder_;
  std::string path_ = folder_.file("mine.json");
};

TEST_F(TopologyFile, BEY13_the_documented_example_is_read) {
  const auto topology = read_topology(write(example()));
  EXPECT_EQ(topology.name(), "mine");
  ASSERT_EQ(topology.size(), 5);
  EXPECT_EQ(topology.kind(), Stochastic::doubly);
  ASSERT_EQ(topology.period(), 3);
  auto groups = means_of({{0, 1}, {2, 3}, {4}}, 5);
  groups[0][0] = groups[1][1] = groups[2][2] = groups[3][3] = 0.75;
  groups[0][1] = groups[1][0] = groups[2][3] = groups[3][2] = 0.25;
  EXPECT_EQ(dense(topology.round(0)), groups);
  auto links = identity(5);
  links[0][0] = links[1][1] = links[2][2] = 1.0 / 3;
  links[0][1] = links[1][0] = links[1][2] = links[2][1] = links[0][2] = links[2][0] = 1.0 / 3;
  links[3][3] = links[4][4] = links[3][4] = links[4][3] = 0.5;
  EXPECT_LT(largest_difference(dense(topology.round(1)), links), 1e-15);
  auto edges = identity(5);
  edges[2][2] = edges[3][3] = edges[4][4] = edges[3][2] = edges[4][3] = edges[2][4] = 0.5;
  EXPECT_EQ(dense(topology.round(2)), edges);
}

TEST_F(TopologyFile, BEY13_what_is_wrong_in_a_file_is_named) {
  EXPECT_THAT(refusal([&] { read_topology(folder_.file("none.json")); }), HasSubstr("none.json: No such file"));
  EXPECT_THAT(refusal([&] { read_topology(folder_.path()); }), HasSubstr("is not a regular file"));
  EXPECT_THAT(mutated("{", "{{"), HasSubstr("not JSON: "));
  EXPECT_THAT(mutated("\"ranks\"", "\"rank\""), HasSubstr("unknown key \"rank\": it may have ranks, kind, rounds"));
  EXPECT_THAT(mutated("\"ranks\": 5", "\"ranks\": 5.5"), HasSubstr("ranks: 5.5 is not a whole number"));
  EXPECT_THAT(mutated("\"ranks\": 5", "\"ranks\": 99999999999"), HasSubstr("ranks: 99999999999 is not"));
  EXPECT_THAT(mutated("\"ranks\": 5", "\"ranks\": 4"), HasSubstr("round 0: rank 4 in a group: ranks are 0 to 3"));
  EXPECT_THAT(mutated("\"ranks\": 5,", ""), HasSubstr("\"ranks\" is missing"));
  EXPECT_THAT(mutated("\"doubly\"", "\"twice\""), HasSubstr("kind: \"twice\": give \"doubly\", \"row\" or \"column\""));
  EXPECT_THAT(mutated("\"groups\"", "\"group\""), HasSubstr("rounds[0]: unknown key \"group\""));
  EXPECT_THAT(mutated("[2, 3]", "[2, \"3\"]"), HasSubstr("rounds[0].groups[1][1]: \"3\" is not a whole number"));
  EXPECT_THAT(mutated("[2, 3]", "3"), HasSubstr("rounds[0].groups[1]: give a list that is not empty"));
  EXPECT_THAT(mutated("[1, 2]", "[1, 2, 3]"), HasSubstr("rounds[1].links[1]: give 2 values, not 3"));
  EXPECT_THAT(mutated("[2, 3, 0.5]", "[2, 3]"), HasSubstr("rounds[2].edges[0]: give 3 values, not 2"));
  EXPECT_THAT(mutated("[2, 3, 0.5]", "[2, 3, null]"), HasSubstr("rounds[2].edges[0][2]: null is not a number"));
  EXPECT_THAT(mutated("[2, 3, 0.5]", "[2, 3, 0.6]"), HasSubstr("round 2: the weights out of rank 2 sum to 1.1"));
  const auto text = example();
  const auto rounds = text.substr(text.find("\"rounds\""), text.rfind(']') + 1 - text.find("\"rounds\""));
  EXPECT_THAT(mutated(rounds, "\"rounds\": []"), HasSubstr("rounds: give a list that is not empty"));
  EXPECT_THAT(mutated(rounds, "\"rounds\": [{}]"), HasSubstr("rounds[0]: give one of \"groups\", \"links\" and"));
  EXPECT_THAT(refusal([&] { read_topology(write("[1]")); }), HasSubstr("give an object"));
}

}  // namespace
}  // namespace shoal::test::input_test
