#pragma once
// Copies of neighbours' parameters, for the exchange of compressed differences.

#include <map>
#include <optional>
#include <tuple>
#include <vector>

#include "comm/gossip/channel.h"
#include "shoal/decentralized.h"

namespace shoal {

// CHOCO-SGD (Koloskova, Stich, Jaggi, ICML 2019): beside its parameters x a rank keeps a copy h that its readers have,
// too. It sends q = C(x - h), and both sides add q to h; what C leaves out stays in x - h for a later message. Ranks
// mix copies, x <- x + rate * sum over j of W_ij (h_j - h_i), which preserves the mean over ranks.
//
// Every round of the topology has its own copies, so that a message goes to the readers of its round only. A message
// names the version that it builds on. A reader that missed that version does not use the copy until it is right again,
// because a wrong copy would pull at its parameters in every step. To repair copies, every message carries a 64th of h
// itself.
class PublicCopies {
 public:
  // rounds: number of the topology's rounds. Copies start at zero.
  PublicCopies(const GossipBuffer& buffer, const CompressedExchange& how, int64_t rounds);

  // Size of a message, always the same.
  int64_t message_bytes() const { return header_bytes + refreshed_bytes_ + difference_bytes_; }
  // Writes the message of a version; its readers have this rank's copy afterwards. values: x, [numel].
  void write(int64_t version, const at::Tensor& values, const at::Tensor& message);
  // Takes a rank's message. A message that is not newer than the rank's last one has no effect.
  void take(int rank, int64_t version, const at::Tensor& message);
  // Whether the rank's last message was of the version's round, and its copy is complete.
  bool knows(int rank, int64_t version) const;
  // sum [numel] += rate * weight * (h_rank - h_own) for the version's round, which knows() must hold for.
  void add_difference(int rank, int64_t version, double weight, at::Tensor& sum) const;

  // Sets all copies to values that all ranks hold, with `version` as the last one shown.
  void all_hold(const at::Tensor& values, int64_t version);
  // This rank's copies, by round.
  std::vector<at::Tensor> own() const;
  // Resumes after `version` with these copies of this rank, by round, and none of other ranks.
  void resume(const std::vector<at::Tensor>& own, int64_t version);
  // Sets another rank's copy for a round, after a version that the rank shows again.
  void set_copy(int rank, int64_t round, const at::Tensor& values, int64_t version);
  // Forgets a rank that a new process has replaced.
  void forget(int rank);
  // Starts the copies at zero again, because other ranks read this one from now on, in so many rounds. The next
  // messages tell the readers.
  void start_afresh(int64_t rounds);

 private:
  static constexpr int64_t header_bytes = 128;  // number of rounds, and the version that the message builds on
  static constexpr int64_t nothing = -1;        // as a version: the copy is zero
  struct Copy {
    at::Tensor values;
    int64_t version = nothing;  // version that the copy stands for
    int64_t unknown = 0;        // number of messages of its round until the copy is complete
  };
  Copy zero() const;
  at::Tensor compressed(const at::Tensor& difference) const;
  void add_compressed(at::Tensor& copy, const at::Tensor& message) const;
  // The elements that the version's message carries uncompressed, one of `rounds` parts.
  at::Tensor refreshed(const at::Tensor& copy, int64_t version, int64_t rounds) const;
  int64_t rounds() const { return static_cast<int64_t>(own_.size()); }
  int64_t round_of(int64_t version) const { return version % rounds(); }

  int64_t numel_;
  int64_t kept_;  // number of elements sent with top_k
  CompressedExchange how_;
  int64_t refreshed_numel_;
  int64_t refreshed_bytes_;  // in a message, followed by the difference
  int64_t difference_bytes_;
  at::TensorOptions options_;
  std::vector<Copy> own_;                                       // by round
  std::map<std::tuple<int64_t, int64_t, int>, Copy> theirs_{};  // by number of rounds, round and rank
  std::optional<Copy> beginning_{};                             // values that all ranks started with
  std::map<int, int64_t> newest_{};                             // newest message, by rank
};

}  // namespace shoal
