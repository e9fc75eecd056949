// Agreement on the topology: all ranks have the same one, or all of them name two ranks that differ.

#include <gmock/gmock.h>

#include "shoal/error.h"
#include "shoal/topology.h"
#include "tests/support/world.h"

namespace shoal::test::agree_test {
namespace {

using ::testing::HasSubstr;

std::string disagreement(const Topology& topology) {
  try {
    agree(world().group(), topology);
  } catch (const DisagreeError& error) {
    return error.what();
  }
  return "(they agreed)";
}

bool last() {
  return world().rank() == world().size() - 1;
}

TEST(TopologyAgreement, BEY13_equal_topologies_pass) {
  for (const auto* name : {"complete", "ring", "one-peer-exp", "random"}) {
    EXPECT_NO_THROW(agree(world().group(), make_topology(name, world().size(), 1, 3))) << name;
  }
}

TEST(TopologyAgreement, BEY13_ranks_that_differ_are_named_on_every_rank) {
  const int size = world().size();
  const auto other = "rank " + std::to_string(size - 1) + " has ";
  const auto names = disagreement(make_topology(last() ? "complete" : "ring", size));
  EXPECT_THAT(names, HasSubstr("topology: ranks disagree at item 0: rank 0 has ring, " + std::to_string(size)));
  EXPECT_THAT(names, HasSubstr(other + "complete, "));
  // One weight of the second round.
  RoundSpec star, mean{.groups = {{0}}, .weight = last() ? 0.5 : 0.5 + 1e-12};
  for (int rank = 1; rank < size; ++rank) {
    star.links.emplace_back(0, rank);
    mean.groups[0].push_back(rank);
  }
  const auto weights = disagreement(Topology("mine", size, Stochastic::doubly, {star, mean}));
  EXPECT_THAT(weights, HasSubstr("rank 0 has round 1 with weights "));
  EXPECT_THAT(weights, HasSubstr(other + "round 1 with weights "));
}

TEST(TopologyAgreement, BEY13_a_size_that_is_not_the_groups_is_refused_on_every_rank) {
  EXPECT_THROW(agree(world().group(), make_topology("ring", world().size() + 1)), UsageError);
  world().group().barrier().wait();
}

}  // namespace
}  // namespace shoal::test::agree_test
