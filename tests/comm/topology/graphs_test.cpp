// Built-in topologies compared with matrices written from their definitions.

#include <gtest/gtest.h>

#include <numeric>
#include <set>

#include "tests/comm/topology/dense.h"

namespace shoal::test::graphs_test {
namespace {

void expect_rounds(const Topology& topology, const std::vector<Groups>& rounds) {
  SCOPED_TRACE(topology.fingerprint());
  ASSERT_EQ(topology.period(), static_cast<int64_t>(rounds.size()));
  for (size_t i = 0; i < rounds.size(); ++i) {
    EXPECT_LT(largest_difference(dense(topology.round(static_cast<int64_t>(i))), means_of(rounds[i], topology.size())),
              1e-15)
        << "round " << i;
  }
}

TEST(Topology, DEC06_every_name_is_doubly_stochastic_for_every_size) {
  std::set<std::string> known;
  for (const auto& [name, summary] : known_topologies()) known.insert(name);
  for (const auto& name : built_in_names) {
    EXPECT_EQ(known.count(name), 1U) << name;
    for (int size = 1; size <= 17; ++size) {
      const auto topology = make_topology(name, size);
      SCOPED_TRACE(topology.fingerprint());
      EXPECT_EQ(topology.name(), name);
      EXPECT_EQ(topology.size(), size);
      for (int64_t index = 0; index < topology.period(); ++index) {
        const auto& round = topology.round(index);
        const auto matrix = dense(round);
        for (int rank = 0; rank < size; ++rank) {
          double row = 0, column = 0;
          std::vector<int> targets;
          for (int other = 0; other < size; ++other) {
            EXPECT_GE(matrix[rank][other], 0);
            row += matrix[rank][other];
            column += matrix[other][rank];
            if (other != rank && matrix[other][rank] > 0) targets.push_back(other);
          }
          EXPECT_NEAR(row, 1, 1e-12);
          EXPECT_NEAR(column, 1, 1e-12);
          EXPECT_EQ(round.targets(rank), targets);
        }
      }
      EXPECT_EQ(&topology.round(topology.period()), &topology.round(0)) << "rounds repeat";
    }
  }
}

TEST(Topology, DEC06_the_origins_graphs_are_reproduced) {
  expect_rounds(make_topology("complete", 4), {{{0, 1, 2, 3}}});
  expect_rounds(make_topology("complete", 8), {{{0, 1, 2, 3, 4, 5, 6, 7}}});
  expect_rounds(make_topology("ring", 2), {{{0, 1}}, {{0, 1}}});
  expect_rounds(make_topology("ring", 4), {{{0, 1}, {2, 3}}, {{0, 3}, {1, 2}}});
  expect_rounds(make_topology("ring", 8), {{{0, 1}, {2, 3}, {4, 5}, {6, 7}}, {{0, 7}, {1, 2}, {3, 4}, {5, 6}}});
  expect_rounds(make_topology("one-peer-exp", 4), {{{0, 1}, {2, 3}}, {{0, 2}, {1, 3}}});
  expect_rounds(make_topology("one-peer-exp", 8),
                {{{0, 1}, {2, 3}, {4, 5}, {6, 7}}, {{0, 2}, {1, 3}, {4, 6}, {5, 7}}, {{0, 4}, {1, 5}, {2, 6}, {3, 7}}});
  expect_rounds(make_topology("alternating-exp-ring", 4, 1),
                {{{0}, {1}, {2, 3}}, {{0, 1}, {2}, {3}}, {{0}, {2}, {1, 3}}, {{0, 2}, {1}, {3}}});
  expect_rounds(make_topology("alternating-exp-ring", 4, 2), {{{0, 1}, {2, 3}}, {{0, 1, 2, 3}}});
  expect_rounds(make_topology("alternating-exp-ring", 8, 2), {{{0, 1}, {2, 3}, {4, 5, 6, 7}},
                                                              {{0, 1, 2, 3}, {4, 5}, {6, 7}},
                                                              {{0, 1}, {4, 5}, {2, 3, 6, 7}},
                                                              {{0, 1, 4, 5}, {2, 3}, {6, 7}}});
  expect_rounds(make_topology("alternating-exp-ring", 8, 4),
                {{{0, 1, 2, 3}, {4, 5, 6, 7}}, {{0, 1, 2, 3, 4, 5, 6, 7}}});
}

TEST(Topology, DEC06_one_peer_exp_reaches_the_mean_after_log2_n_rounds) {
  for (const auto& [size, rounds] : {std::pair(2, 1), std::pair(4, 2), std::pair(8, 3), std::pair(16, 4)}) {
    const auto topology = make_topology("one-peer-exp", size);
    ASSERT_EQ(topology.period(), rounds);
    EXPECT_LT(distance_from_mean(product(topology, rounds)), 1e-12) << size;
    EXPECT_GT(distance_from_mean(product(topology, rounds - 1)), 1e-3) << size;
  }
}

TEST(Topology, DEC07_one_peer_exp_of_other_sizes_is_one_message_out_and_one_in) {
  for (const int size : {3, 5, 6, 7, 11}) {
    const auto topology = make_topology("one-peer-exp", size);
    ASSERT_EQ(topology.period(), static_cast<int64_t>(std::ceil(std::log2(size))));
    for (int64_t index = 0; index < topology.period(); ++index) {
      const int distance = 1 << index;
      for (int rank = 0; rank < size; ++rank) {
        const auto& round = topology.round(index);
        EXPECT_EQ(round.self(rank), 0.5);
        EXPECT_EQ(round.sources(rank), (std::vector<Neighbour>{{(rank + size - distance) % size, 0.5}}));
        EXPECT_EQ(round.targets(rank), std::vector<int>{(rank + distance) % size});
      }
    }
  }
}

TEST(Topology, DEC07_in_an_odd_ring_every_rank_idles_once_and_every_link_is_used_alike) {
  expect_rounds(make_topology("ring", 3), {{{0}, {1, 2}}, {{1}, {2, 0}}, {{2}, {0, 1}}});
  for (const int size : {5, 7, 9}) {
    const auto topology = make_topology("ring", size);
    ASSERT_EQ(topology.period(), size);
    std::vector<int> idle(size), used(size);
    for (int64_t index = 0; index < size; ++index) {
      const auto& round = topology.round(index);
      for (int rank = 0; rank < size; ++rank) {
        if (round.idle(rank)) ++idle[rank];
        const int next = (rank + 1) % size;
        if (round.targets(rank) == std::vector<int>{next} && round.targets(next) == std::vector<int>{rank})
          ++used[rank];
      }
    }
    EXPECT_EQ(idle, std::vector<int>(size, 1));
    EXPECT_EQ(used, std::vector<int>(size, (size - 1) / 2));
  }
}

TEST(Topology, DEC07_base_2_reaches_the_mean_with_one_peer_for_every_size) {
  for (int size = 1; size <= 40; ++size) {
    const auto topology = make_topology("base-2", size);
    EXPECT_LT(distance_from_mean(product(topology, topology.period())), 1e-12) << size;
    EXPECT_LE(topology.period(), 2 * static_cast<int64_t>(std::log2(size)) + 1);
    for (int64_t index = 0; index < topology.period(); ++index) {
      for (int rank = 0; rank < size; ++rank) EXPECT_LE(topology.round(index).targets(rank).size(), 1U);
    }
  }
}

TEST(Topology, DEC07_any_number_of_hosts_in_pairs_or_alone) {
  expect_rounds(make_topology("alternating-exp-ring", 6, 2),
                {{{0, 1}, {2, 3}, {4, 5}}, {{0, 1, 2, 3}, {4, 5}}, {{0, 1, 4, 5}, {2, 3}}, {{0, 1}, {4, 5}, {2, 3}}});
  expect_rounds(make_topology("alternating-exp-ring", 3, 3), {{{0, 1, 2}}});
  expect_rounds(make_topology("alternating-exp-ring", {.size = 2}), {{{0}, {1}}, {{0, 1}}});
  expect_rounds(make_topology("alternating-exp-ring", {.size = 4, .hosts = {3, 1}}),
                {{{0, 1, 2}, {3}}, {{0, 1, 2, 3}}});
}

TEST(Topology, DEC06_random_matchings_come_from_the_seed_alone) {
  const auto first = make_topology("random", 6, 1, 7);
  EXPECT_EQ(first.period(), 64);
  EXPECT_EQ(first.fingerprint(), make_topology("random", 6, 1, 7).fingerprint());
  EXPECT_NE(first.fingerprint(), make_topology("random", 6, 1, 8).fingerprint());
  // Drawn with splitmix64 and the Fisher-Yates shuffle in another language.
  const std::vector<Groups> drawn{{{0, 2}, {1, 5}, {3, 4}}, {{0, 4}, {1, 5}, {2, 3}}, {{0, 1}, {2, 5}, {3, 4}}};
  for (size_t i = 0; i < drawn.size(); ++i)
    EXPECT_EQ(dense(first.round(static_cast<int64_t>(i))), means_of(drawn[i], 6));
  const auto odd = make_topology("random", 5, 1, 7);
  EXPECT_EQ(dense(odd.round(0)), means_of({{0, 3}, {1, 4}, {2}}, 5));
  EXPECT_EQ(dense(odd.round(1)), means_of({{0, 1}, {2}, {3, 4}}, 5));
}

std::vector<int> ranks_of(const std::vector<Neighbour>& neighbours) {
  std::vector<int> ranks;
  for (const auto& neighbour : neighbours) ranks.push_back(neighbour.rank);
  return ranks;
}

TEST(Topology, DEC06_graphs_that_do_not_change) {
  const auto sources = [](const char* name, int size, int rank) {
    return ranks_of(make_topology(name, size).round(0).sources(rank));
  };
  EXPECT_EQ(sources("exp", 6, 0), (std::vector<int>{2, 4, 5}));        // 0 - 4, 0 - 2, 0 - 1
  EXPECT_EQ(sources("hypercube", 8, 5), (std::vector<int>{1, 4, 7}));  // 101: 001, 100, 111
  EXPECT_EQ(sources("hypercube", 6, 5), (std::vector<int>{1, 4}));     // 7 is not there
  EXPECT_EQ(sources("torus", 12, 0), (std::vector<int>{1, 3, 4, 8}));  // 3 rows of 4
  EXPECT_EQ(sources("grid", 12, 0), (std::vector<int>{1, 4}));
  EXPECT_EQ(sources("torus", 6, 4), (std::vector<int>{1, 3, 5}));  // 2 rows of 3: above is below
  EXPECT_EQ(sources("torus", 7, 6), (std::vector<int>{0, 5}));     // 1 row
  EXPECT_EQ(sources("star", 4, 0), (std::vector<int>{1, 2, 3}));
  const auto star = make_topology("star", 4);
  EXPECT_EQ(star.round(0).sources(2), (std::vector<Neighbour>{{0, 0.25}}));  // 1 / (1 + max(3, 1))
  EXPECT_DOUBLE_EQ(star.round(0).self(2), 0.75);
  EXPECT_DOUBLE_EQ(star.round(0).self(0), 0.25);
  const auto grid = make_topology("grid", 9);
  EXPECT_EQ(grid.round(0).sources(0), (std::vector<Neighbour>{{1, 0.25}, {3, 0.25}}));  // a corner beside edges
  EXPECT_DOUBLE_EQ(grid.round(0).self(0), 0.5);
}

TEST(Topology, DEC06_a_hundred_steps_of_float32_keep_the_mean) {
  for (const auto& name : built_in_names) {
    for (const int size : {3, 8, 13}) {
      const auto topology = make_topology(name, size);
      std::vector<float> values(size);
      for (int rank = 0; rank < size; ++rank) values[rank] = std::sin(static_cast<float>(7 * rank + 1));
      const auto mean = [&] { return std::accumulate(values.begin(), values.end(), 0.0) / size; };
      const double before = mean();
      for (int64_t step = 0; step < 100; ++step) {
        const auto& round = topology.round(step);
        std::vector<float> mixed(size);
        for (int rank = 0; rank < size; ++rank) {
          // Rounded weights do not sum to 1, which differences times weights tolerate.
          mixed[rank] = values[rank];
          for (const auto& source : round.sources(rank)) {
            mixed[rank] += static_cast<float>(source.weight) * (values[source.rank] - values[rank]);
          }
        }
        values = mixed;
      }
      EXPECT_NEAR(mean(), before, 1e-6) << topology.fingerprint();
    }
  }
}

}  // namespace
}  // namespace shoal::test::graphs_test
