// Topologies after the loss of ranks.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "shoal/error.h"
#include "shoal/topology.h"

namespace shoal {
namespace {

using Matrix = std::vector<std::vector<double>>;  // [to][from], own weights on the diagonal

Matrix dense(const MixingRound& round) {
  Matrix weights(round.size(), std::vector<double>(round.size()));
  for (int to = 0; to < round.size(); ++to) {
    weights[to][to] = round.self(to);
    for (const auto& source : round.sources(to)) weights[to][source.rank] = source.weight;
  }
  return weights;
}

void remove_row_and_column(Matrix& weights, int rank) {
  weights.erase(weights.begin() + rank);
  for (auto& row : weights) row.erase(row.begin() + rank);
}

bool directed_at(const Matrix& weights, int rank) {
  constexpr double rounding = 1e-12;
  for (size_t other = 0; other < weights.size(); ++other) {
    if (std::abs(weights[other][rank] - weights[rank][other]) > rounding) return true;
  }
  return false;
}

void lose(Matrix& weights, int lost, Stochastic kind) {
  const int size = static_cast<int>(weights.size());
  const bool joined = kind == Stochastic::doubly && directed_at(weights, lost);
  const auto row = weights[lost];
  for (int to = 0; to < size; ++to) {
    if (to == lost) continue;
    const double into = weights[to][lost];
    if (!joined) {
      weights[to][to] += kind == Stochastic::column ? row[to] : into;
      continue;
    }
    for (int from = 0; from < size; ++from) {
      if (from != lost) weights[to][from] += into * row[from] / (1 - row[lost]);
    }
  }
  remove_row_and_column(weights, lost);
}

RoundSpec spec_of(const Matrix& weights) {
  RoundSpec spec;
  const int size = static_cast<int>(weights.size());
  std::vector<bool> busy(size);
  for (int to = 0; to < size; ++to) {
    // Sums of parts may exceed 1 by rounding.
    spec.self.push_back(std::min(1.0, weights[to][to]));
    for (int from = 0; from < size; ++from) {
      if (from == to || weights[to][from] == 0) continue;
      spec.edges.push_back({from, to, std::min(1.0, weights[to][from])});
      busy[from] = busy[to] = true;
    }
  }
  for (int rank = 0; rank < size; ++rank) {
    if (!busy[rank]) spec.idle.push_back(rank);
  }
  return spec;
}

// A round in which all neighbours of a lost rank average with each other, so that the ranks it connected stay
// connected.
RoundSpec bridge(const std::vector<MixingRound>& rounds, const std::vector<bool>& lost) {
  std::vector<bool> neighbours(lost.size());
  for (const auto& round : rounds) {
    for (int to = 0; to < round.size(); ++to) {
      for (const auto& source : round.sources(to)) {
        if (lost[source.rank]) neighbours[to] = true;
        if (lost[to]) neighbours[source.rank] = true;
      }
    }
  }
  RoundSpec spec{.groups = {{}}};
  int number = 0;  // index among the remaining ranks
  for (size_t rank = 0; rank < lost.size(); ++rank) {
    if (lost[rank]) continue;
    if (neighbours[rank]) {
      spec.groups.front().push_back(number);
    } else {
      spec.groups.push_back({number});
    }
    ++number;
  }
  return spec;
}

// Numbers of remaining ranks by host.
std::vector<int> remaining(const std::vector<int>& hosts, const std::vector<bool>& lost) {
  std::vector<int> left;
  size_t rank = 0;
  for (const int count : hosts) {
    const auto begin = lost.begin() + static_cast<std::ptrdiff_t>(rank);
    const auto alive = static_cast<int>(std::count(begin, begin + count, false));
    if (alive > 0) left.push_back(alive);
    rank += static_cast<size_t>(count);
  }
  return left;
}

}  // namespace

Topology Topology::without(const std::vector<int>& ranks) const {
  std::vector<bool> lost(size_);
  for (const int rank : ranks) {
    if (rank < 0 || rank >= size_) {
      throw UsageError(fmt::format("topology {} without rank {}: ranks are 0 to {}", name_, rank, size_ - 1));
    }
    if (lost[rank]) throw UsageError(fmt::format("topology {} without rank {}: it is given twice", name_, rank));
    lost[rank] = true;
  }
  const int left = size_ - static_cast<int>(ranks.size());
  if (left == 0) throw UsageError(fmt::format("topology {}: no rank would be left", name_));
  if (request_) {
    try {
      return make_topology(name_, {.size = left, .hosts = remaining(request_->hosts, lost), .seed = request_->seed});
    } catch (const UsageError&) {
      // The registered factory does not support this size; the present edges still serve the remaining ranks.
    }
  }
  std::vector<RoundSpec> rounds;
  for (const auto& round : *rounds_) {
    auto weights = dense(round);
    for (int rank = size_ - 1; rank >= 0; --rank) {
      if (lost[rank]) lose(weights, rank, kind_);
    }
    rounds.push_back(spec_of(weights));
  }
  try {
    return {name_, left, kind_, rounds};
  } catch (const UsageError&) {
    // The lost ranks connected the others.
    rounds.push_back(bridge(*rounds_, lost));
    return {name_, left, kind_, rounds};
  }
}

}  // namespace shoal
