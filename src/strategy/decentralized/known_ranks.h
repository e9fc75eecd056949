#pragma once
// A rank's knowledge about the steps of the other ranks.

#include <cstdint>
#include <optional>
#include <vector>

namespace shoal {

// Weights that ranks gave to backward(loss_sum, weight), and steps in which their gradients overflowed. They are
// appended to the values that ranks show, and passed on: news reaches every rank within as many steps as the topology
// needs. News lost with a late neighbour comes with its next values.
class KnownRanks {
 public:
  struct Entry {
    int64_t version = 0;      // last version that the rank showed, as far as is known; 0: nothing is known
    double weight = -1;       // running mean over its steps; negative: it gave none
    uint64_t overflowed = 0;  // bit k: gradients of its step `version - k` had inf or NaN
  };
  static constexpr int64_t remembered = 64;  // number of steps whose overflows are known

  // Entries are indexed by rank of the group.
  KnownRanks(int ranks, int own);

  // Adds this rank's step, which it shows as `version`.
  void add(int64_t version, std::optional<double> weight, bool overflowed);
  // Sets the weights of all ranks' first step. Negative: the rank gave none.
  void all_weigh(const std::vector<double>& weights);

  // The message that is appended to shown values, in whole cache lines.
  int64_t message_bytes() const;
  void write(void* message) const;
  void take(const void* message);

  // Whether this rank's steps have weights.
  bool weighs() const { return entries_[own_].weight >= 0; }
  // Mean of the known weights of these ranks; none if no weight is known.
  std::optional<double> mean_weight(const std::vector<int>& ranks) const;
  bool overflowed(int64_t version) const;

  const std::vector<Entry>& entries() const { return entries_; }
  // Resumes from these entries; starts afresh if they are of another number of ranks.
  void load(std::vector<Entry> entries);

 private:
  std::vector<Entry> entries_;
  int own_;
};

}  // namespace shoal
