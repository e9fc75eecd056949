#pragma once
// Topologies as plain matrices, for comparison.

#include <cmath>
#include <string>
#include <vector>

#include "shoal/topology.h"

namespace shoal::test {

using Matrix = std::vector<std::vector<double>>;  // [to][from]
using Groups = std::vector<std::vector<int>>;
using Vector = std::vector<double>;

const std::vector<std::string> built_in_names{"complete", "ring", "one-peer-exp", "alternating-exp-ring",
                                              "base-2",   "exp",  "hypercube",    "torus",
                                              "grid",     "star", "random"};

inline Matrix zeros(int size) {
  return Matrix(size, Vector(size));
}

inline Matrix identity(int size) {
  auto matrix = zeros(size);
  for (int rank = 0; rank < size; ++rank) matrix[rank][rank] = 1;
  return matrix;
}

inline Matrix dense(const MixingRound& round) {
  auto matrix = zeros(round.size());
  for (int to = 0; to < round.size(); ++to) {
    matrix[to][to] = round.self(to);
    for (const auto& source : round.sources(to)) matrix[to][source.rank] += source.weight;
  }
  return matrix;
}

// Matrix that gives every rank the mean of its group.
inline Matrix means_of(const Groups& groups, int size) {
  auto matrix = zeros(size);
  for (const auto& group : groups) {
    for (const int to : group) {
      for (const int from : group) matrix[to][from] = 1.0 / static_cast<double>(group.size());
    }
  }
  return matrix;
}

inline Matrix product(const Matrix& left, const Matrix& right) {
  const auto size = left.size();
  auto result = zeros(static_cast<int>(size));
  for (size_t i = 0; i < size; ++i) {
    for (size_t k = 0; k < size; ++k) {
      for (size_t j = 0; j < size; ++j) result[i][j] += left[i][k] * right[k][j];
    }
  }
  return result;
}

// Product of the first `rounds` rounds, the first one on the right.
inline Matrix product(const Topology& topology, int64_t rounds) {
  auto result = identity(topology.size());
  for (int64_t i = 0; i < rounds; ++i) result = product(dense(topology.round(i)), result);
  return result;
}

inline double largest_difference(const Matrix& left, const Matrix& right) {
  double most = left.size() == right.size() ? 0 : INFINITY;
  for (size_t i = 0; i < left.size() && i < right.size(); ++i) {
    for (size_t j = 0; j < left.size(); ++j) most = std::max(most, std::abs(left[i][j] - right[i][j]));
  }
  return most;
}

inline double distance_from_mean(const Matrix& matrix) {
  const auto size = static_cast<int>(matrix.size());
  return largest_difference(matrix, Matrix(size, Vector(size, 1.0 / size)));
}

inline Vector times(const Matrix& matrix, const Vector& values) {
  Vector result(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    for (size_t j = 0; j < values.size(); ++j) result[i] += matrix[i][j] * values[j];
  }
  return result;
}

}  // namespace shoal::test
