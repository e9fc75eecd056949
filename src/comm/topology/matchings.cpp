// Sequences of matchings for any number of ranks.

#include <algorithm>
#include <bit>
#include <numeric>

#include "comm/topology/graphs.h"

namespace shoal {
namespace {

// splitmix64 (Steele, Lea and Flood 2014). Ranks must draw the same numbers, and the standard library's shuffle differs
// between implementations.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t below(uint64_t limit) {
    state_ += 0x9e3779b97f4a7c15U;
    uint64_t mixed = state_;
    mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9U;
    mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebU;
    return (mixed ^ (mixed >> 31)) % limit;
  }

 private:
  uint64_t state_;
};

// A pair mixes; weight: what each rank takes of the other.
void pair_up(RoundSpec& round, int a, int b, double weight) {
  round.edges.push_back({a, b, weight});
  round.edges.push_back({b, a, weight});
}

// Averages 2^k ranks from `first` on, in rounds begin .. begin + k - 1.
void average(Rounds& rounds, size_t begin, int first, int count) {
  for (int distance = 1; distance < count; distance *= 2) {
    for (int rank = 0; rank < count; ++rank) {
      if ((rank & distance) == 0) pair_up(rounds[begin], first + rank, first + rank + distance, 0.5);
    }
    ++begin;
  }
}

void find_idle(Rounds& rounds, int size) {
  for (auto& round : rounds) {
    std::vector<bool> busy(size);
    for (const auto& edge : round.edges) busy[edge.to] = true;
    for (int rank = 0; rank < size; ++rank) {
      if (!busy[rank]) round.idle.push_back(rank);
    }
  }
}

}  // namespace

Rounds random_matchings(int size, uint64_t seed) {
  constexpr int period = 64;
  Random random(seed);
  std::vector<int> order(size);
  std::iota(order.begin(), order.end(), 0);
  Rounds rounds(period);
  for (auto& round : rounds) {
    for (int last = size - 1; last > 0; --last) std::swap(order[last], order[random.below(last + 1)]);
    for (int place = 0; place + 1 < size; place += 2) round.groups.push_back({order[place], order[place + 1]});
    if (size % 2 == 1) round.groups.push_back({order.back()});
  }
  return rounds;
}

// Divides ranks into blocks of 2^k, the largest first. Every block averages. Then, block by block, each later rank
// meets a rank of the block and takes such a share of it that the later ranks together have the mean of all ranks from
// the block on. The block's remainder has that mean as well, and one more average within the block completes it, while
// later blocks proceed in the same way. At most 2 k + 1 rounds; k for a power of two.
Rounds base_2(int size) {
  if (size == 1) return complete(1);
  std::vector<int> blocks;
  for (int rest = size; rest > 0; rest -= blocks.back()) {
    blocks.push_back(static_cast<int>(std::bit_floor(static_cast<unsigned>(rest))));
  }
  const auto steps = [](int block) { return static_cast<size_t>(std::countr_zero(static_cast<unsigned>(block))); };
  const auto largest = steps(blocks.front());
  size_t period = largest;
  for (size_t block = 0; block + 1 < blocks.size(); ++block) {
    period = std::max(period, largest + block + 1 + steps(blocks[block]));
  }
  Rounds rounds(period);
  int first = 0;
  for (size_t block = 0; block < blocks.size(); ++block) {
    const int count = blocks[block];
    average(rounds, 0, first, count);
    if (block + 1 < blocks.size()) {
      const auto weight = static_cast<double>(count) / (size - first);
      for (int later = first + count; later < size; ++later) {
        pair_up(rounds[largest + block], later - count, later, weight);
      }
      average(rounds, largest + block + 1, first, count);
    }
    first += count;
  }
  find_idle(rounds, size);
  return rounds;
}

}  // namespace shoal
