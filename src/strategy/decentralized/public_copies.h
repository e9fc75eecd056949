#pragma once
// Copies of neighbours' parameters, for the exchange of compressed differences.

#include <map>
#include <optional>
#include <tuple>
#include <vector>

#include "comm/gossip/channel.h"
#include "shoal/decentralized.h"

namespace shoal {

// CHOCO-SGD (Koloskova, Stich, Jaggi, ICML 2019): beside its parameters x a rank keeps a copy h that its readers have
// too. It sends q = C(x - h), and both sides add q to h; what C leaves out stays in x - h and goes another time. Ranks
// mix copies, x <- x + rate * sum over j of W_ij (h_j - h_i), so that the mean over ranks stays what it is.
//
// Every round of the topology has copies of its own: a message then goes to the readers of its round alone. A message
// says on which one it builds. A reader that has missed that one leaves the copy alone until it is right again, since
// what it has wrong would pull at its parameters in every step: every message carries a 64th of h itself.
class PublicCopies {
 public:
  // rounds: of the topology. Copies are zero at first.
  PublicCopies(const GossipBuffer& buffer, const CompressedExchange& how, int64_t rounds);

  // As a version is shown: bytes, always as many.
  int64_t message_bytes() const { return header_bytes + refreshed_bytes_ + difference_bytes_; }
  // Writes the version's message, after which readers have this rank's copy. values: x, [numel].
  void write(int64_t version, const at::Tensor& values, const at::Tensor& message);
  // A rank's message has come. One that is not newer than its last one changes nothing.
  void take(int rank, int64_t version, const at::Tensor& message);
  // Whether the rank's last message was of the version's round, and its copy is right.
  bool knows(int rank, int64_t version) const;
  // sum [numel] += rate * weight * (h_rank - h_own), of the version's round, which this rank knows.
  void add_difference(int rank, int64_t version, double weight, at::Tensor& sum) const;

  // All ranks hold these values, and have shown `version` last.
  void all_hold(const at::Tensor& values, int64_t version);
  // A new process has taken the rank's place.
  void forget(int rank);
  // Other ranks read this one now, in so many rounds: its copies begin at zero again, as its next messages say.
  void begin_anew(int64_t rounds);

 private:
  static constexpr int64_t header_bytes = 128;  // of a message: the number of rounds, and the version it builds on
  static constexpr int64_t nothing = -1;        // in a version's place: zero
  struct Copy {
    at::Tensor values;
    int64_t version = nothing;  // that it stands for
    int64_t unknown = 0;        // messages of its round until it is right
  };
  Copy zero() const;
  at::Tensor compressed(const at::Tensor& difference) const;
  void add_compressed(at::Tensor& copy, const at::Tensor& message) const;
  // The elements that the version's message carries as they are, one of so many rounds.
  at::Tensor refreshed(const at::Tensor& copy, int64_t version, int64_t rounds) const;
  int64_t rounds() const { return static_cast<int64_t>(own_.size()); }
  int64_t round_of(int64_t version) const { return version % rounds(); }

  int64_t numel_;
  int64_t kept_;  // elements that travel, with top_k
  CompressedExchange how_;
  int64_t refreshed_numel_;
  int64_t refreshed_bytes_;  // of the message, whose rest is the difference
  int64_t difference_bytes_;
  at::TensorOptions options_;
  std::vector<Copy> own_;                                       // by round
  std::map<std::tuple<int64_t, int64_t, int>, Copy> theirs_{};  // by number of rounds, round and rank
  std::optional<Copy> beginning_{};                             // what all held when they began
  std::map<int, int64_t> newest_{};                             // message by rank
};

}  // namespace shoal
