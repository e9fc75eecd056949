// DEC17: topologies of the remaining ranks.

#include <gmock/gmock.h>

#include "shoal/error.h"
#include "tests/comm/topology/dense.h"

namespace shoal::test::without_test {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(TopologyWithout, DEC17_a_named_one_is_made_again_for_fewer_ranks) {
  for (const auto& name : built_in_names) {
    for (const int size : {2, 3, 8, 9}) {
      const auto topology = make_topology(name, size, 1, 7);
      const auto left = topology.without({1});
      EXPECT_EQ(left.fingerprint(), make_topology(name, size - 1, 1, 7).fingerprint());
      if (size > 3) {
        EXPECT_EQ(left.without({0, 4}).fingerprint(), make_topology(name, size - 3, 1, 7).fingerprint());
      }
    }
  }
}

TEST(TopologyWithout, DEC17_who_is_left_stays_on_its_host) {
  const auto six = make_topology("alternating-exp-ring", 6, 2);
  const auto five = six.without({1});  // hosts of 1, 2, 2
  EXPECT_LT(largest_difference(dense(five.round(0)), means_of({{0}, {1, 2}, {3, 4}}, 5)), 1e-15);
  EXPECT_LT(largest_difference(dense(five.round(1)), means_of({{0, 1, 2}, {3, 4}}, 5)), 1e-15);
  const auto four = five.without({0});  // its host is gone
  EXPECT_EQ(four.fingerprint(), make_topology("alternating-exp-ring", 4, 2).fingerprint());
}

TEST(TopologyWithout, DEC17_weights_of_lost_edges_go_to_the_ranks_own) {
  const Topology square("square", 4, Stochastic::doubly,
                        {{.links = {{0, 1}, {1, 2}, {2, 3}, {3, 0}}}, {.groups = {{0, 2}, {1, 3}}, .weight = 0.75}});
  const auto left = square.without({1});  // 0, 2, 3 are 0, 1, 2 now
  EXPECT_EQ(left.name(), "square");
  EXPECT_EQ(left.size(), 3);
  const double third = 1.0 / 3;
  EXPECT_LT(
      largest_difference(dense(left.round(0)), {{2 * third, 0, third}, {0, 2 * third, third}, {third, third, third}}),
      1e-15);
  EXPECT_LT(largest_difference(dense(left.round(1)), {{0.75, 0.25, 0}, {0.25, 0.75, 0}, {0, 0, 1}}), 1e-15);
  EXPECT_TRUE(left.round(1).idle(2));
  EXPECT_EQ(square.without({}).fingerprint(), square.fingerprint());
  const auto alone = square.without({0, 3, 1});
  EXPECT_EQ(alone.size(), 1);
  EXPECT_EQ(alone.round(0).self(0), 1);
}

TEST(TopologyWithout, DEC17_neighbours_of_a_rank_that_connected_the_others_average_with_each_other) {
  // 0 - 1 - 2 and 1 - 3 - 4, one link a round.
  const Topology tree("tree", 5, Stochastic::doubly,
                      {{.links = {{0, 1}}, .idle = {2, 3, 4}},
                       {.links = {{1, 2}, {3, 4}}, .idle = {0}},
                       {.links = {{1, 3}}, .idle = {0, 2, 4}}});
  const auto left = tree.without({1});  // 0, 2, 3, 4 are 0, 1, 2, 3 now
  ASSERT_EQ(left.period(), 4);
  const double third = 1.0 / 3;
  EXPECT_LT(
      largest_difference(dense(left.round(3)),
                         {{third, third, third, 0}, {third, third, third, 0}, {third, third, third, 0}, {0, 0, 0, 1}}),
      1e-15);
  EXPECT_EQ(tree.without({4}).period(), 3) << "a leaf connects nobody";
  const Topology star("star", 4, Stochastic::row,
                      {{.edges = {{0, 1, 0.5}, {0, 2, 0.5}, {0, 3, 0.5}, {1, 0, 0.25}, {2, 0, 0.25}, {3, 0, 0.25}}}});
  EXPECT_EQ(star.without({0}).without({0}).size(), 2) << "and again";
}

TEST(TopologyWithout, DEC17_directed_rounds_keep_their_kind) {
  const std::vector<Edge> circle{{0, 1, 0.5},   {1, 2, 0.25},  {2, 3, 0.5},  {3, 0, 0.5},
                                 {0, 3, 0.125}, {3, 1, 0.125}, {1, 0, 0.125}};
  for (const auto kind : {Stochastic::row, Stochastic::column}) {
    const Topology topology("circle", 4, kind, {{.edges = circle}});
    const auto left = topology.without({2});
    EXPECT_EQ(left.kind(), kind);
    auto expected = dense(topology.round(0));
    if (kind == Stochastic::row) expected[3][3] += expected[3][2];
    if (kind == Stochastic::column) expected[1][1] += expected[2][1];
    for (auto& row : expected) row.erase(row.begin() + 2);
    expected.erase(expected.begin() + 2);
    EXPECT_LT(largest_difference(dense(left.round(0)), expected), 1e-15);
  }
  // A doubly stochastic circle is closed over the gap: 3 takes from 1 what it took from 2.
  const std::vector<Edge> even{{0, 1, 0.5}, {1, 2, 0.5}, {2, 3, 0.5}, {3, 0, 0.5}};
  const auto left = Topology("circle", 4, Stochastic::doubly, {{.edges = even}}).without({2});
  EXPECT_LT(largest_difference(dense(left.round(0)), {{0.5, 0, 0.5}, {0.5, 0.5, 0}, {0, 0.5, 0.5}}), 1e-15);
}

TEST(TopologyWithout, DEC17_what_cannot_be_left_is_refused) {
  const auto ring = make_topology("ring", 4);
  const auto message = [](const std::string& part) { return ThrowsMessage<UsageError>(HasSubstr(part)); };
  EXPECT_THAT([&] { ring.without({4}); }, message("without rank 4: ranks are 0 to 3"));
  EXPECT_THAT([&] { ring.without({-1}); }, message("without rank -1: ranks are 0 to 3"));
  EXPECT_THAT([&] { ring.without({1, 1}); }, message("without rank 1: it is given twice"));
  EXPECT_THAT([&] { ring.without({0, 1, 2, 3}); }, message("no rank would be left"));
}

}  // namespace
}  // namespace shoal::test::without_test
