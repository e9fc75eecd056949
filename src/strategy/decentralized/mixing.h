#pragma once
// Mixing of parameters with neighbours' in each step, tolerating late and lost neighbours.

#include <functional>
#include <memory>
#include <set>
#include <vector>

#include "comm/gossip/channel.h"
#include "comm/gossip/rejoin.h"
#include "shoal/decentralized.h"
#include "strategy/decentralized/known_ranks.h"
#include "strategy/decentralized/public_copies.h"

namespace shoal {

// Of a load, for which Mixing::weights_from() gives none.
inline constexpr const char* push_sum_begins_anew =
    "the checkpoint has push-sum's weights of other buckets, which are not alike; they begin with 1";

class Mixing {
 public:
  // Collective, except for a newcomer.
  Mixing(Group group, Topology topology, double timeout_seconds);

  // For a process that replaces a dead rank. Call in this order: meet_donor(), open(), arrive(), show() of all buffers,
  // settle().
  // Returns the group of two with the neighbour that gives its state, which is rank 0 of it.
  Group meet_donor();
  // Agrees with the other ranks on the version that this rank shows first; returns the one before. mass: of push-sum.
  int64_t arrive(std::vector<double> mass);
  // Waits until the other ranks include this rank.
  void settle();
  // For the other ranks: sets the function that gives this rank's state to rank 1 of the pair. Without it no rank can
  // rejoin.
  void admit_with(GossipAdmission::HandOver hand_over) { hand_over_ = std::move(hand_over); }

  // Opens buffers, which are shown in dtype `as`, or compressed. Call once, before the first step ends. Collective,
  // except for a newcomer.
  void open(const std::vector<GossipBuffer>& buffers, std::optional<at::ScalarType> as,
            const std::optional<CompressedExchange>& compressed = std::nullopt);
  // Tells that all ranks hold these values [numel] of a buffer: at the start, and when all ranks start afresh.
  void all_hold(size_t buffer, const at::Tensor& values);

  // Begins a step: removes neighbours that have ended, and includes those that have rejoined.
  void begin_step();

  // Removes neighbours that have ended, and those listed in `also`. Call between steps.
  void remove_lost(const std::vector<int>& also = {});
  // Call before a collective: also removes ranks that ended after showing values for the next step.
  void remove_ended();

  struct Gathered {
    double own = 1;       // weight of this rank's own values
    at::Tensor others{};  // weighted sum of the neighbours' or, compressed, of their differences to this rank's,
                          // [numel]; valid until the next gather; none: no neighbour
  };
  // What to mix into a buffer in this step.
  Gathered gather(size_t buffer);
  // Mixes directly into values [numel], which takes a third of the memory traffic. Only for a round with one neighbour
  // that shows its values as they are; false: use gather().
  bool mix_into(size_t buffer, const at::Tensor& values);
  // Shows a buffer's values after this step. `write` writes them, multiplied by `scale`, to a tensor [numel].
  void show(size_t buffer, const std::function<void(const at::Tensor& flat, double scale)>& write);
  // Call after all buffers have been shown.
  void end_step() { ++version_; }

  // values [numel] <- mean over ranks, with push-sum's weights, which are equal afterwards. Collective.
  void average(const Group& group, size_t buffer, at::Tensor& values, const Label& label);
  // Starts afresh on all ranks after `version`, which no rank has shown yet, with equal values.
  void restart(int64_t version);
  int64_t version() const { return version_; }  // last version shown
  // Stops this rank until all ranks start afresh; the others learn of it, with `reason`, a number that the caller
  // defines.
  void stop(uint32_t reason);
  // A rank of the group that stopped before this version, and its reason.
  std::optional<std::pair<int, uint32_t>> stopped_before(int64_t version) const;
  const std::vector<double>& mass() const { return mass_; }

  // Sets the news that the next step carries; call before its first buffer is shown.
  void tell(std::optional<double> weight, bool overflowed) { known_.add(version_ + 1, weight, overflowed); }
  // Divisor of this rank's sums, such that the mean over ranks is sum / sum of weights. own: this rank's weight.
  double mean_weight(double own) const;
  KnownRanks& known() { return known_; }
  const KnownRanks& known() const { return known_; }

  // Resumes from another point, with its `version` and push-sum weights, before anything is shown. Without push-sum all
  // weights are 1: values are stored divided by their weight. UsageError if ranks have left. Collective.
  void resume_from(int64_t version, std::vector<double> mass);
  // Push-sum's weights of the buffers, from those of a training that may have had other buffers (`same`: it had these).
  // None if a buffer's parts had different weights on some rank: all ranks then begin with the weight 1, at the values
  // that they have. Collective, with push-sum.
  std::optional<std::vector<double>> weights_from(const std::vector<double>& stored, bool same) const;
  // This rank's copies of a buffer for the compressed exchange, by round of the topology; none: the exchange is plain.
  std::vector<at::Tensor> copies(size_t buffer) const;
  // Resumes with these copies, and sends them to this rank's readers. Call it after resume_from(), once the last
  // version is shown. Collective.
  void resume_copies(size_t buffer, const std::vector<at::Tensor>& own);

  const MixingRound& round() const { return now_.topology.round(version_); }
  int number() const { return now_.number; }  // this rank's number in the topology
  const Topology& topology() const { return now_.topology; }
  const Topology& whole() const { return whole_; }  // topology of all ranks
  // Ranks that have not been removed. Collective over them if some were removed since the last call.
  const Group& remaining();
  const ExchangeStatistics& statistics() const { return statistics_; }
  // Goes on counting from those of another one, in whose place this one is.
  void count_from(const ExchangeStatistics& former);
  void leave();

 private:
  // Ranks that mix.
  struct Party {
    std::vector<int> members;  // by number in the topology: rank of the group
    Topology topology;
    int number;  // number of this rank
  };
  Party party_of(std::vector<int> members) const;
  void count_in();
  void tell_of_lost(std::vector<int> removed) const;
  void require_all_ranks() const;
  bool pushes() const { return whole_.kind() == Stochastic::column; }
  GossipChannel::Limit limit() const;
  Gathered gather_differences(size_t buffer);
  // GossipChannel::read; also takes the source's knowledge of the ranks.
  Reading read(size_t buffer, int rank, const GossipChannel::Use& use);
  void count(int64_t version, ExchangeStatistics& statistics) const;

  Group group_;
  Topology whole_;  // topology of all ranks
  Party now_;
  std::optional<Party> next_;  // from the next shown version on, because a rank has joined
  double timeout_seconds_;
  std::vector<GossipBuffer> buffers_;
  std::vector<at::Tensor> others_;   // one per dtype, as large as its largest buffer
  std::vector<GossipBuffer> shown_;  // as the channel has them
  std::unique_ptr<GossipChannel> channel_;
  int64_t version_ = 0;
  std::optional<Group> remaining_;
  GossipAdmission admission_;
  GossipAdmission::HandOver hand_over_;
  std::unique_ptr<Newcomer> newcomer_;  // set until this rank has arrived
  int last_newcomer_ = 0;               // number of the last newcomer; 0: none
  std::vector<double> mass_;            // push-sum's weight, by buffer
  std::vector<PublicCopies> copies_;    // by buffer, for compressed exchanges
  KnownRanks known_;
  ExchangeStatistics statistics_;
};

}  // namespace shoal
