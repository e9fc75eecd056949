#include "comm/topology/connected.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>

#include "shoal/error.h"

namespace shoal {
namespace {

// Ranks that rank 0's values reach (`forward`) or whose values reach rank 0, with rounds in any order.
std::vector<bool> reached(const std::vector<MixingRound>& rounds, bool forward) {
  std::vector<bool> seen(rounds[0].size());
  std::vector<int> open{0};
  seen[0] = true;
  const auto visit = [&](int rank) {
    if (seen[rank]) return;
    seen[rank] = true;
    open.push_back(rank);
  };
  while (!open.empty()) {
    const int rank = open.back();
    open.pop_back();
    for (const auto& round : rounds) {
      if (forward) {
        for (const int target : round.targets(rank)) visit(target);
      } else {
        for (const auto& source : round.sources(rank)) visit(source.rank);
      }
    }
  }
  return seen;
}

std::string listed(const std::vector<bool>& chosen, bool value) {
  constexpr size_t most = 16;
  std::vector<int> ranks;
  for (size_t rank = 0; rank < chosen.size(); ++rank) {
    if (chosen[rank] == value) ranks.push_back(static_cast<int>(rank));
  }
  const auto count = ranks.size();
  if (count > most) ranks.resize(most);
  return fmt::format("rank{} {}{}", count > 1 ? "s" : "", fmt::join(ranks, ", "),
                     count > most ? fmt::format(" .. ({} of them)", count) : "");
}

// Non-zero entries of a matrix, 64 to a word.
class Pattern {
 public:
  explicit Pattern(int size) : words_((size + 63) / 64), rows_(size, Row(words_)) {}

  void set(int row, int column) { rows_[row][column / 64] |= uint64_t{1} << (column % 64); }
  bool get(int row, int column) const { return (rows_[row][column / 64] >> (column % 64) & 1) != 0; }
  // row |= other's row `from`
  void join(int row, const Pattern& other, int from) {
    for (size_t word = 0; word < words_; ++word) rows_[row][word] |= other.rows_[from][word];
  }
  Pattern squared() const {
    Pattern result(size());
    for (int row = 0; row < size(); ++row) {
      for (int middle = 0; middle < size(); ++middle) {
        if (get(row, middle)) result.join(row, *this, middle);
      }
    }
    return result;
  }
  bool full() const {
    for (int row = 0; row < size(); ++row) {
      for (int column = 0; column < size(); ++column) {
        if (!get(row, column)) return false;
      }
    }
    return true;
  }
  int size() const { return static_cast<int>(rows_.size()); }

 private:
  using Row = std::vector<uint64_t>;

  size_t words_;
  std::vector<Row> rows_;
};

// Whether the product of a period is primitive (some power of it has no zero), so that all eigenvalues but one are
// below 1. Power (n - 1)^2 + 1 of an n x n matrix decides (Wielandt).
bool mixes(const std::vector<MixingRound>& rounds) {
  constexpr double nothing = 1e-9;  // larger than what rounding leaves of a zero weight
  const int size = rounds[0].size();
  Pattern product(size);
  for (int rank = 0; rank < size; ++rank) product.set(rank, rank);
  for (const auto& round : rounds) {
    Pattern next(size);
    for (int rank = 0; rank < size; ++rank) {
      if (round.self(rank) > nothing) next.join(rank, product, rank);
      for (const auto& source : round.sources(rank)) next.join(rank, product, source.rank);
    }
    product = std::move(next);
  }
  const int64_t enough = int64_t{size - 1} * (size - 1) + 1;
  for (int64_t power = 1; power < enough && !product.full(); power *= 2) product = product.squared();
  return product.full();
}

}  // namespace

void prove_connected(const std::vector<MixingRound>& rounds, const std::string& where) {
  const auto from_first = reached(rounds, true);
  const auto to_first = reached(rounds, false);
  const auto all = [](const std::vector<bool>& seen) {
    return std::find(seen.begin(), seen.end(), false) == seen.end();
  };
  if (!all(from_first)) {
    throw UsageError(fmt::format("{}: the values of {} never reach {} over the {} round(s)", where,
                                 listed(from_first, true), listed(from_first, false), rounds.size()));
  }
  if (!all(to_first)) {
    throw UsageError(fmt::format("{}: the values of {} never reach {} over the {} round(s)", where,
                                 listed(to_first, false), listed(to_first, true), rounds.size()));
  }
  if (mixes(rounds)) return;
  throw UsageError(fmt::format(
      "{}: values move from rank to rank but never mix over the {} round(s): let ranks keep a part of their own", where,
      rounds.size()));
}

}  // namespace shoal
