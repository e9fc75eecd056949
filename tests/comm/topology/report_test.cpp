// Spectral gaps and steps compared with theory and with vectors that are really mixed.

#include <gtest/gtest.h>

#include <numbers>
#include <numeric>
#include <random>

#include "tests/comm/topology/dense.h"

namespace shoal::test::report_test {
namespace {

constexpr double pi = std::numbers::pi;

Vector differences(Vector values) {
  const double mean = std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
  for (auto& value : values) value -= mean;
  return values;
}

double length(const Vector& values) {
  return std::sqrt(std::inner_product(values.begin(), values.end(), values.begin(), 0.0));
}

Vector normalised(Vector values) {
  const double before = length(values);
  for (auto& value : values) value /= before;
  return values;
}

// Random vector of length 1 with mean 0.
Vector random_start(int size, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  Vector values(size);
  for (auto& value : values) value = normal(random);
  return normalised(differences(values));
}

// Two rounds of pairs: each rotates the other's averages by 2 pi / n.
TEST(TopologyReport, BEY13_ring_beside_theory) {
  for (const int size : {6, 8, 12, 32}) {
    const auto report = make_topology("ring", size).report();
    EXPECT_NEAR(report.period_contraction, std::cos(2 * pi / size), 1e-9) << size;
    EXPECT_NEAR(report.spectral_gap, 1 - std::cos(2 * pi / size), 1e-9) << size;
    EXPECT_NEAR(report.step_contraction, std::cos(2 * pi / size), 1e-9) << size;
    EXPECT_FALSE(report.exact_after);
  }
  EXPECT_EQ(make_topology("ring", 4).report().exact_after, 2);
  EXPECT_EQ(make_topology("ring", 2).report().exact_after, 1);
}

// Ying et al. 2021: 2 / (1 + ceil(log2 n)) for even n; the same for hypercubes; a torus has sums of cosines as
// eigenvalues.
TEST(TopologyReport, BEY13_graphs_that_do_not_change_beside_theory) {
  for (const int size : {4, 6, 8, 12, 16, 22}) {
    EXPECT_NEAR(make_topology("exp", size).spectral_gap(), 2 / (1 + std::ceil(std::log2(size))), 1e-9) << size;
  }
  EXPECT_NEAR(make_topology("hypercube", 8).spectral_gap(), 2.0 / 4, 1e-9);
  EXPECT_NEAR(make_topology("hypercube", 32).spectral_gap(), 2.0 / 6, 1e-9);
  EXPECT_NEAR(make_topology("torus", 16).spectral_gap(), 1 - 3.0 / 5, 1e-9);
  EXPECT_NEAR(make_topology("torus", 25).spectral_gap(), 1 - (3 + 2 * std::cos(2 * pi / 5)) / 5, 1e-9);
  EXPECT_NEAR(make_topology("torus", 7).spectral_gap(), 1 - (1 + 2 * std::cos(2 * pi / 7)) / 3, 1e-9);
  EXPECT_NEAR(make_topology("star", 5).spectral_gap(), 1.0 / 5, 1e-9);
  EXPECT_NEAR(make_topology("complete", 9).spectral_gap(), 1, 1e-12);
}

TEST(TopologyReport, BEY13_random_vectors_contract_as_reported) {
  for (const auto& name : built_in_names) {
    for (const int size : {3, 6, 8, 13}) {
      const auto topology = make_topology(name, size);
      const auto report = topology.report();
      SCOPED_TRACE(topology.fingerprint());
      auto values = random_start(size, 3);
      if (report.exact_after) {
        for (int64_t step = 0; step < *report.exact_after; ++step) values = times(dense(topology.round(step)), values);
        EXPECT_LT(length(values), 1e-12);
        EXPECT_EQ(report.step_contraction, 0);
        continue;
      }
      constexpr int first = 100, measured = 200;  // periods
      double logarithm = 0;
      for (int period = 0; period < first + measured; ++period) {
        for (int64_t step = 0; step < topology.period(); ++step) {
          values = differences(times(dense(topology.round(step)), values));
        }
        const double left = length(values);
        EXPECT_LE(left, report.period_contraction * (1 + 1e-9)) << "of 1, after one period";
        if (period >= first) logarithm += std::log(left);
        values = normalised(values);
      }
      const double expected = std::log(report.step_contraction);
      EXPECT_NEAR(logarithm / static_cast<double>(measured * topology.period()), expected, 0.05 * std::abs(expected));
    }
  }
}

// Root mean square over starting vectors, as the norm of the images of all unit vectors.
double naive_distance(const Topology& topology, int64_t steps) {
  const auto all = product(topology, steps);
  double squares = 0;
  for (int start = 0; start < topology.size(); ++start) {
    Vector values(topology.size(), -1.0 / topology.size());
    values[start] += 1;
    squares += std::pow(length(differences(times(all, values))), 2);
  }
  return std::sqrt(squares / (topology.size() - 1));
}

TEST(TopologyReport, BEY13_steps_until_a_thousandth_are_left) {
  for (const auto& name : built_in_names) {
    for (const int size : {2, 5, 12}) {
      const auto topology = make_topology(name, size, 1, 5);
      SCOPED_TRACE(topology.fingerprint());
      const auto report = topology.report();
      ASSERT_TRUE(report.steps_to_thousandth);
      const auto steps = *report.steps_to_thousandth;
      EXPECT_LE(naive_distance(topology, steps), 1.0001e-3);
      EXPECT_GT(naive_distance(topology, steps - 1), 0.9999e-3);
      for (size_t step = 0; step < report.distance.size(); ++step) {
        EXPECT_NEAR(report.distance[step], naive_distance(topology, static_cast<int64_t>(step)), 1e-9) << step;
      }
    }
  }
}

TEST(TopologyReport, BEY13_messages) {
  const auto sent = [](const char* name, int size) {
    const auto report = make_topology(name, size).report();
    return std::pair(report.mean_sent, report.most_sent);
  };
  EXPECT_EQ(sent("complete", 8), std::pair(7.0, 7));
  EXPECT_EQ(sent("one-peer-exp", 8), std::pair(1.0, 1));
  EXPECT_EQ(sent("one-peer-exp", 7), std::pair(1.0, 1));
  EXPECT_EQ(sent("ring", 5), std::pair(0.8, 1));
  EXPECT_EQ(sent("star", 4), std::pair(1.5, 3));
  EXPECT_EQ(sent("complete", 1), std::pair(0.0, 0));
}

TEST(TopologyReport, BEY13_one_rank_agrees_from_the_start) {
  for (const auto& name : built_in_names) {
    const auto report = make_topology(name, 1).report();
    EXPECT_EQ(report.exact_after, 0);
    EXPECT_EQ(report.steps_to_thousandth, 0);
    EXPECT_EQ(report.spectral_gap, 1);
  }
}

const std::vector<RoundSpec> one_way{{.edges = {{0, 1, 0.5}, {1, 2, 0.25}, {2, 0, 0.5}, {0, 2, 0.25}}}};

// Ranks agree, but not on the mean. The 3 x 3 matrix has the eigenvalues 1 and 0.25 (1 + i), 0.25 (1 - i).
TEST(TopologyReport, BEY13_row_stochastic_rounds_bring_ranks_together) {
  const Topology topology("one-way", 3, Stochastic::row, one_way);
  const auto report = topology.report();
  auto values = random_start(3, 1);
  double before = 0;
  for (int64_t step = 0; step < 20; ++step) {
    if (step == 4) before = length(differences(values));
    values = times(dense(topology.round(step)), values);
  }
  EXPECT_NEAR(std::pow(length(differences(values)) / before, 1.0 / 16), std::sqrt(0.125), 1e-4);
  EXPECT_NEAR(report.step_contraction, std::sqrt(0.125), 1e-9);
  EXPECT_DOUBLE_EQ(report.spectral_gap, 1 - report.step_contraction);
  EXPECT_GT(std::abs(values[0]), 1e-3) << "the mean was 0";
}

// Push-sum: values and a weight of 1 are mixed in the same way, and their quotient is the mean.
TEST(TopologyReport, BEY13_column_stochastic_rounds_give_push_sum_the_mean) {
  const Topology topology(
      "one-way", 3, Stochastic::column,
      {{.edges = {{0, 1, 0.5}, {1, 2, 0.25}, {2, 0, 0.5}}}, {.edges = {{0, 2, 0.25}, {2, 1, 0.5}, {1, 0, 0.1}}}});
  Vector values{1, -2, 7}, weights{1, 1, 1};
  const auto report = topology.report();
  ASSERT_TRUE(report.steps_to_thousandth);
  for (int64_t step = 0; step < 4 * *report.steps_to_thousandth; ++step) {
    values = times(dense(topology.round(step)), values);
    weights = times(dense(topology.round(step)), weights);
  }
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_NEAR(values[rank] / weights[rank], 2, 1e-9);
  }
  EXPECT_GT(std::abs(weights[0] - weights[1]), 0.01) << "without the weights it would be another mean";
}

TEST(TopologyReport, BEY13_weights_that_change_nothing_never_get_there) {
  const Topology topology("slow", 2, Stochastic::doubly, {{.edges = {{0, 1, 1e-17}, {1, 0, 1e-17}}}});
  EXPECT_FALSE(topology.report().steps_to_thousandth);
}

}  // namespace
}  // namespace shoal::test::report_test
