#pragma once
// What ranks know of each other's parameters when they exchange compressed differences.

#include <map>
#include <vector>

#include "comm/gossip/channel.h"
#include "shoal/strategy/decentralized.h"

namespace shoal {

// CHOCO-SGD (Koloskova, Stich, Jaggi, ICML 2019): beside its parameters x a rank keeps a copy h that its readers have
// too. It sends q = C(x - h), and both sides add q to h; what C leaves out stays in x - h and goes another time. Ranks
// mix copies, x <- x + rate * sum over j of W_ij (h_j - h_i), so that the mean over ranks stays what it is.
//
// Every round of the topology has copies of its own: a message then goes to the readers of its round alone. And every
// message carries a 64th of h itself, so that a reader that has missed some, or is new, has the right copy in the end.
class PublicCopies {
 public:
  // rounds: of the topology. Copies are zero at first.
  PublicCopies(const GossipBuffer& buffer, const CompressedExchange& how, int64_t rounds);

  // As a version is shown: bytes, always as many.
  int64_t message_bytes() const { return refreshed_bytes_ + difference_bytes_; }
  // Writes the version's message, after which readers have this rank's copy. values: x, [numel].
  void write(int64_t version, const at::Tensor& values, const at::Tensor& message);
  // A rank's message has come. One that is not newer than the last one of its round changes nothing.
  void take(int rank, int64_t version, const at::Tensor& message);
  // sum [numel] += rate * weight * (h_rank - h_own), of the version's round. The rank's message must have come.
  void add_difference(int rank, int64_t version, double weight, at::Tensor& sum) const;

  // All ranks hold these values, and have shown `version` last.
  void all_hold(const at::Tensor& values, int64_t version);
  // A new process has taken the rank's place; a copy of its values begins anew.
  void forget(int rank);
  // The topology has other rounds now.
  void set_rounds(int64_t rounds);

 private:
  struct Copy {
    at::Tensor values;
    int64_t version = 0;  // that it stands for
  };
  at::Tensor compressed(const at::Tensor& difference) const;
  void add_compressed(at::Tensor& copy, const at::Tensor& message) const;
  // The elements that the version's message carries as they are.
  at::Tensor refreshed(const at::Tensor& copy, int64_t version) const;
  int64_t round_of(int64_t version) const { return version % static_cast<int64_t>(own_.size()); }

  int64_t numel_;
  int64_t kept_;  // elements that travel, with top_k
  CompressedExchange how_;
  int64_t refreshed_numel_;
  int64_t refreshed_bytes_;  // of the message, whose rest is the difference
  int64_t difference_bytes_;
  std::vector<Copy> own_;                             // by round
  std::map<std::pair<int64_t, int>, Copy> theirs_{};  // by round and rank
};

}  // namespace shoal
