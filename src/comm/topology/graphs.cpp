#include "comm/topology/graphs.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <set>

namespace shoal {
namespace {

std::vector<int> everyone(int size) {
  std::vector<int> ranks(size);
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

bool is_power_of_two(int size) {
  return std::has_single_bit(static_cast<unsigned>(size));
}

// 1, 2, 4, .. below `size`.
std::vector<int> distances(int size) {
  std::vector<int> result;
  for (int distance = 1; distance < size; distance *= 2) result.push_back(distance);
  return result;
}

// Groups of j and j + distance mod count, greedily from j = 0; a rank without a free partner is alone.
std::vector<std::vector<int>> matching(int count, int distance) {
  std::vector<bool> used(count);
  std::vector<std::vector<int>> groups;
  for (int first = 0; first < count; ++first) {
    if (used[first]) continue;
    const int second = (first + distance) % count;
    auto& group = groups.emplace_back(std::vector<int>{first});
    if (!used[second]) group.push_back(second);
    for (const int each : group) used[each] = true;
  }
  return groups;
}

Rounds unchanging(const std::set<std::pair<int, int>>& links) {
  if (links.empty()) return complete(1);
  return {{.links = {links.begin(), links.end()}}};
}

// Rows and columns as equal as possible; a prime number is one row.
Rounds lattice(int size, bool closed) {
  int rows = 1;
  for (int divisor = 1; divisor * divisor <= size; ++divisor) {
    if (size % divisor == 0) rows = divisor;
  }
  const int columns = size / rows;
  std::set<std::pair<int, int>> links;
  const auto link = [&](int a, int b) {
    if (a != b) links.insert(std::minmax(a, b));
  };
  for (int row = 0; row < rows; ++row) {
    for (int column = 0; column < columns; ++column) {
      const int rank = row * columns + column;
      if (closed || column + 1 < columns) link(rank, row * columns + (column + 1) % columns);
      if (closed || row + 1 < rows) link(rank, (row + 1) % rows * columns + column);
    }
  }
  return unchanging(links);
}

}  // namespace

Rounds complete(int size) {
  return {{.groups = {everyone(size)}}};
}

Rounds ring(int size) {
  if (size == 1) return complete(1);
  // With an odd size each round is the previous one shifted by a rank, so that every rank idles once in `size` rounds.
  const bool even = size % 2 == 0;
  Rounds rounds(even ? 2 : size);
  for (int shift = 0; shift < static_cast<int>(rounds.size()); ++shift) {
    auto& groups = rounds[shift].groups;
    if (!even) groups.push_back({shift});
    for (int rank = even ? 0 : 1; rank + 1 < size; rank += 2) {
      groups.push_back({(rank + shift) % size, (rank + 1 + shift) % size});
    }
  }
  return rounds;
}

Rounds one_peer_exp(int size) {
  if (size == 1) return complete(1);
  Rounds rounds;
  for (const int distance : distances(size)) {
    auto& round = rounds.emplace_back();
    if (is_power_of_two(size)) {
      round.groups = matching(size, distance);
      continue;
    }
    for (int rank = 0; rank < size; ++rank) round.edges.push_back({rank, (rank + distance) % size, 0.5});
  }
  return rounds;
}

Rounds alternating_exp_ring(const std::vector<int>& hosts) {
  std::vector<std::vector<int>> ranks;
  int next = 0;
  for (const int count : hosts) {
    auto& host = ranks.emplace_back(count);
    std::iota(host.begin(), host.end(), next);
    next += count;
  }
  const int count = static_cast<int>(hosts.size());
  if (count == 1) return complete(next);
  Rounds rounds;
  int pairs = 0;
  for (const int distance : distances(count)) {
    // A pair of hosts is one group in one of two rounds; pairs alternate between them, so that half of the links
    // between hosts are busy at a time.
    RoundSpec both[2];
    for (const auto& pair : matching(count, distance)) {
      const bool matched = pair.size() == 2;
      const int joint = matched ? 1 - pairs++ % 2 : -1;
      for (const int half : {0, 1}) {
        auto& groups = both[half].groups;
        if (half != joint) {
          for (const int host : pair) groups.push_back(ranks[host]);
          continue;
        }
        groups.push_back(ranks[pair[0]]);
        groups.back().insert(groups.back().end(), ranks[pair[1]].begin(), ranks[pair[1]].end());
      }
    }
    rounds.push_back(std::move(both[0]));
    rounds.push_back(std::move(both[1]));
  }
  return rounds;
}

Rounds exponential(int size) {
  const auto hops = distances(size);
  if (hops.empty()) return complete(1);
  RoundSpec round;
  const double weight = 1.0 / static_cast<double>(hops.size() + 1);
  for (const int distance : hops) {
    for (int rank = 0; rank < size; ++rank) round.edges.push_back({rank, (rank + distance) % size, weight});
  }
  return {round};
}

Rounds torus(int size) {
  return lattice(size, true);
}

Rounds grid(int size) {
  return lattice(size, false);
}

Rounds hypercube(int size) {
  std::set<std::pair<int, int>> links;
  for (const int bit : distances(size)) {
    for (int rank = 0; rank < size; ++rank) {
      // Clearing a rank's highest bit gives a lower rank, so the graph is connected for any size.
      if ((rank & bit) == 0 && rank + bit < size) links.emplace(rank, rank + bit);
    }
  }
  return unchanging(links);
}

Rounds star(int size) {
  std::set<std::pair<int, int>> links;
  for (int rank = 1; rank < size; ++rank) links.emplace(0, rank);
  return unchanging(links);
}

}  // namespace shoal
