#pragma once
// Averaging with neighbours in a step, including late and lost ones.

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

class Mixing {
 public:
  // Collective, but for a newcomer.
  Mixing(Group group, Topology topology, double timeout_seconds);

  // For a process that has taken a dead rank's place, in this order: meet_donor(), open(), arrive(), show() of
  // all buffers, settle().
  // The group of two with the neighbour that gives its state, rank 0 in it.
  Group meet_donor();
  // Agrees with the others on the version that this rank shows next; returns the one before. mass: push-sum's.
  int64_t arrive(std::vector<double> mass);
  // Until the others count this rank in.
  void settle();
  // For the others: what gives this rank's state to rank 1 of the group. Without it nobody joins again.
  void admit_with(Admission::HandOver hand_over) { hand_over_ = std::move(hand_over); }

  // Buffers are shown in `as`, or compressed, where given. Collective, but for a newcomer; once, before the first step
  // ends.
  void open(const std::vector<GossipBuffer>& buffers, std::optional<at::ScalarType> as,
            const std::optional<CompressedExchange>& compressed = std::nullopt);
  // All ranks hold these values of a buffer, [numel]: at the start, and when they begin anew.
  void all_hold(size_t buffer, const at::Tensor& values);

  // A step begins: neighbours that have ended are removed, those that have joined again are counted in.
  void begin_step();

  // Removes neighbours that have ended, and those that `also` names. Between steps.
  void remove_lost(const std::vector<int>& also = {});
  // Before something collective: also those that have ended with values shown that were to be mixed in the next step.
  void remove_ended();

  struct Gathered {
    double own = 1;       // weight of this rank's own values
    at::Tensor others{};  // weighted sum of the neighbours' or, compressed, of their differences to this rank's,
                          // [numel]; valid until the next gather; none: no neighbour
  };
  // What is mixed into a buffer in this step.
  Gathered gather(size_t buffer);
  // The same into values [numel] at once, where that takes a third of the memory traffic: a round with one neighbour,
  // whose values are shown as they are. False: gather() must do it.
  bool mix_into(size_t buffer, const at::Tensor& values);
  // Shows a buffer's values after this step: `write` writes `scale` times them to a tensor [numel].
  void show(size_t buffer, const std::function<void(const at::Tensor& flat, double scale)>& write);
  // All buffers have been shown.
  void end_step() { ++version_; }

  // values [numel] <- the mean of the ranks' values, with push-sum's weights, which are equal afterwards. Collective.
  void average(const Group& group, size_t buffer, at::Tensor& values, const Label& label);
  // All ranks begin anew after `version`, which none of them has shown yet, with equal values.
  void restart(int64_t version);
  int64_t version() const { return version_; }  // shown last
  // This rank does not go on before all begin anew; the others learn it and `reason`, a number of the caller's.
  void stop(uint32_t reason);
  // A rank (of the group) that does not go on after a version before this one, and its reason.
  std::optional<std::pair<int, uint32_t>> stopped_before(int64_t version) const;
  const std::vector<double>& mass() const { return mass_; }

  // What is told with the step that is shown next: before its first buffer is.
  void tell(std::optional<double> weight, bool overflowed) { known_.add(version_ + 1, weight, overflowed); }
  // What a sum of this rank's is divided by, so that the mean over ranks is sum / sum of weights; `own`: its weight.
  double mean_weight(double own) const;
  KnownRanks& known() { return known_; }
  const KnownRanks& known() const { return known_; }

  // The training goes on from another point: `version` and push-sum's weights as they were there, nothing shown yet.
  // UsageError when ranks have gone. Collective.
  void go_on_from(int64_t version, std::vector<double> mass);

  const MixingRound& round() const { return now_.topology.round(version_); }
  int number() const { return now_.number; }  // this rank's, in the topology
  const Topology& topology() const { return now_.topology; }
  const Topology& whole() const { return whole_; }  // of all ranks
  // The ranks that have not been removed. Collective over them when some have been since the last call.
  const Group& remaining();
  const ExchangeStatistics& statistics() const { return statistics_; }
  void leave();

 private:
  // Who mixes.
  struct Party {
    std::vector<int> members;  // rank of the group, by number in the topology
    Topology topology;
    int number;  // this rank's
  };
  Party party_of(std::vector<int> members) const;
  void count_in();
  bool pushes() const { return whole_.kind() == Stochastic::column; }
  GossipChannel::Limit limit() const;
  Gathered gather_differences(size_t buffer);
  // GossipChannel::read, which also takes up what the source knows of the ranks.
  Reading read(size_t buffer, int rank, const GossipChannel::Use& use);
  void count(int64_t version, ExchangeStatistics& statistics) const;

  Group group_;
  Topology whole_;  // of all ranks
  Party now_;
  std::optional<Party> next_;  // from the version on that is shown next: somebody has joined
  double timeout_seconds_;
  std::vector<GossipBuffer> buffers_;
  std::vector<at::Tensor> others_;   // one per dtype, as large as the largest buffer
  std::vector<GossipBuffer> shown_;  // what the channel has of them
  std::unique_ptr<GossipChannel> channel_;
  int64_t version_ = 0;
  std::optional<Group> remaining_;
  Admission admission_;
  Admission::HandOver hand_over_;
  std::unique_ptr<Newcomer> newcomer_;  // this rank, until it has arrived
  int last_newcomer_ = 0;               // its number; 0: none
  std::vector<double> mass_;            // push-sum's weight of each buffer
  std::vector<PublicCopies> copies_;    // of each buffer, where exchanges are compressed
  KnownRanks known_;
  ExchangeStatistics statistics_;
};

}  // namespace shoal
