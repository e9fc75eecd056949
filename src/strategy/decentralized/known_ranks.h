#pragma once
// Knowledge of a rank about the steps of the others.

#include <cstdint>
#include <optional>
#include <vector>

namespace shoal {

// The weights that ranks gave to backward(loss_sum, weight), and the steps in which their gradients overflowed. It rides
// behind the values that ranks show anyway and is passed on: news reaches everybody within as many steps as the topology
// takes. What is lost with a late neighbour comes with the next one.
class KnownRanks {
 public:
  struct Entry {
    int64_t version = 0;      // that the rank has shown last, as far as is known; 0: nothing is known
    double weight = -1;       // running mean over its steps; below 0: it has given none
    uint64_t overflowed = 0;  // bit k: its step of version - k had inf or NaN in its gradients
  };
  static constexpr int64_t remembered = 64;  // steps, of which overflows are known

  // By rank of the group.
  KnownRanks(int ranks, int own);

  // This rank's step, which it shows as `version`.
  void add(int64_t version, std::optional<double> weight, bool overflowed);
  // The weights of all ranks' first step. Below 0: it gave none.
  void all_weigh(const std::vector<double>& weights);

  // As it rides behind the values: whole cache lines.
  int64_t message_bytes() const;
  void write(void* message) const;
  void take(const void* message);

  // Whether this rank's steps have weights.
  bool weighs() const { return entries_[own_].weight >= 0; }
  // The mean over those of these ranks whose weight is known; none: of nobody.
  std::optional<double> mean_weight(const std::vector<int>& ranks) const;
  bool overflowed(int64_t version) const;

  const std::vector<Entry>& entries() const { return entries_; }
  // Goes on from there. Of another number of ranks: from nothing.
  void load(std::vector<Entry> entries);

 private:
  std::vector<Entry> entries_;
  int own_;
};

}  // namespace shoal
