#pragma once
// Ranks of a group over tcp, without sockets: all in one thread, whose parts travel in any order.

#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "comm/tcp/collective.h"

namespace shoal::test {

// Ranks and what is on its way between them.
class TcpRanks {
 public:
  TcpRanks(const std::vector<Call>& calls, uint64_t seed) : random_(seed) {
    world_ranks_.resize(calls.size());
    std::iota(world_ranks_.begin(), world_ranks_.end(), 10);
    for (size_t rank = 0; rank < calls.size(); ++rank) {
      staging_.emplace_back(new std::byte[tcp::staging_bytes(static_cast<int>(calls.size()))]);
      ranks_.push_back(std::make_unique<tcp::Collective>(calls[rank], 0, static_cast<int>(rank), world_ranks_,
                                                         staging_.back().get()));
    }
    sent_.resize(calls.size());
    wires_.resize(calls.size(), std::vector<std::deque<tcp::Segment>>(calls.size()));
  }

  // Bytes of data that each rank sends.
  const std::vector<int64_t>& sent() const { return sent_; }

  // What rank `to` is told by all when they enter.
  std::vector<tcp::EntryBytes> entries(int to) {
    std::vector<tcp::EntryBytes> list;
    for (const auto& rank : ranks_) list.push_back(rank->entry(to));
    return list;
  }

  // False if the ranks wait for each other.
  bool run() {
    std::vector<std::vector<tcp::EntryBytes>> all;
    for (int rank = 0; rank < size(); ++rank) {
      all.push_back(entries(rank));
      for (int from = 0; from < size(); ++from) {
        if (from != rank) sent_[from] += static_cast<int64_t>(tcp::read_entry(all[rank][from], ranks_.size()).data);
      }
    }
    for (int rank = 0; rank < size(); ++rank) ranks_[rank]->begin(all[rank]);
    std::vector<std::pair<int, int>> pairs;
    for (int from = 0; from < size(); ++from) {
      for (int to = 0; to < size(); ++to) pairs.emplace_back(from, to);
    }
    for (bool moved = true; moved;) {
      moved = false;
      std::shuffle(pairs.begin(), pairs.end(), random_);
      for (const auto& [from, to] : pairs) moved = (random_() % 2 == 0 ? send(from, to) : deliver(from, to)) || moved;
      if (!moved) {  // nothing was possible in the way that was drawn
        for (const auto& [from, to] : pairs) moved = send(from, to) || deliver(from, to) || moved;
      }
    }
    return std::all_of(ranks_.begin(), ranks_.end(), [](const auto& rank) { return rank->finished(); });
  }

 private:
  int size() const { return static_cast<int>(ranks_.size()); }

  bool send(int from, int to) {
    const auto segment = ranks_[from]->next_to(to);
    if (!segment) return false;
    sent_[from] += segment->bytes;
    wires_[from][to].push_back(*segment);
    return true;
  }

  // The memory of a segment is read when it arrives: a rank that overwrites it too early is found.
  bool deliver(int from, int to) {
    auto& wire = wires_[from][to];
    if (wire.empty()) return false;
    const auto place = ranks_[to]->place_for(from, static_cast<uint64_t>(wire.front().bytes));
    if (!place) return false;
    std::memcpy(*place, wire.front().data, wire.front().bytes);
    wire.pop_front();
    ranks_[to]->received(from);
    ranks_[from]->sent();
    return true;
  }

  std::mt19937_64 random_;
  std::vector<int> world_ranks_;
  std::vector<std::unique_ptr<std::byte[]>> staging_;
  std::vector<std::unique_ptr<tcp::Collective>> ranks_;
  std::vector<int64_t> sent_;
  std::vector<std::vector<std::deque<tcp::Segment>>> wires_;  // from, to
};

}  // namespace shoal::test
