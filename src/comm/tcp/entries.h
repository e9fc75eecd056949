#pragma once
// Announcements of calls between the ranks of a group, on the tcp transport.

#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "comm/tcp/collective.h"

namespace shoal::tcp {

// What all ranks have entered, or are about to.
class Entries {
 public:
  // Operations that a rank has entered and not finished, at most. The sender keeps to this: a receiver that stopped
  // reading entries could not read the parts of the oldest operation, which come behind them.
  static constexpr size_t most_entered = 512;

  explicit Entries(size_t ranks) : by_rank_(ranks) {}

  // Number of the next entry of a rank.
  uint64_t next(int rank) const { return first_ + by_rank_[rank].size(); }
  // True if another entry would be too many: its operations that are not finished begin at most `most_entered` after
  // this rank's.
  bool full(int rank) const { return by_rank_[rank].size() >= 2 * most_entered; }
  void add(int rank, EntryBytes entry) { by_rank_[rank].push_back(std::move(entry)); }
  bool has(int rank, uint64_t number) const { return number < next(rank); }
  // The entries of all ranks for the oldest operation, which is then forgotten.
  std::vector<EntryBytes> take() {
    std::vector<EntryBytes> entries;
    for (auto& list : by_rank_) {
      entries.push_back(std::move(list.front()));
      list.pop_front();
    }
    ++first_;
    return entries;
  }

 private:
  uint64_t first_ = 0;
  std::vector<std::deque<EntryBytes>> by_rank_;
};

}  // namespace shoal::tcp
