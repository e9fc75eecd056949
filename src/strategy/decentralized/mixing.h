#pragma once
// Who averages with whom in a step, and what becomes of neighbours that are late or gone.

#include <functional>
#include <memory>
#include <set>
#include <vector>

#include "comm/gossip/channel.h"
#include "shoal/strategy/decentralized.h"
#include "strategy/decentralized/public_copies.h"

namespace shoal {

class Mixing {
 public:
  Mixing(Group group, Topology topology, double timeout_seconds);

  // Buffers are shown in `as`, or compressed, where given. Collective; once, before the first step ends.
  void open(const std::vector<GossipBuffer>& buffers, std::optional<at::ScalarType> as,
            const std::optional<CompressedExchange>& compressed = std::nullopt);
  // All ranks hold these values of a buffer, [numel]: at the start, and when they begin anew.
  void all_hold(size_t buffer, const at::Tensor& values);

  // A step begins: neighbours that have ended are removed.
  void begin_step();

  struct Gathered {
    double own = 1;       // weight of this rank's own values
    at::Tensor others{};  // weighted sum of the neighbours' or, compressed, of their differences to this rank's,
                          // [numel]; valid until the next gather; none: no neighbour
  };
  // What is mixed into a buffer in this step.
  Gathered gather(size_t buffer);
  // Shows a buffer's values after this step: `write` writes `scale` times them to a tensor [numel].
  void show(size_t buffer, const std::function<void(const at::Tensor& flat, double scale)>& write);
  // All buffers have been shown.
  void end_step() { ++version_; }

  // values [numel] <- the mean of the ranks' values, with push-sum's weights, which are equal afterwards. Collective.
  void average(const Group& group, size_t buffer, at::Tensor& values, const Label& label);
  // All ranks begin anew after `version`, which none of them has shown yet, with equal values.
  void restart(int64_t version);
  int64_t version() const { return version_; }  // shown last
  const std::vector<double>& mass() const { return mass_; }
  // The training goes on from another point: `version` and push-sum's weights as they were there, nothing shown yet.
  // UsageError when ranks have gone. Collective.
  void go_on_from(int64_t version, std::vector<double> mass);

  // Rounds that a run before this one has used.
  void skip_rounds(int64_t rounds) { skipped_rounds_ = rounds; }
  int64_t rounds_begun() const { return version_ == 0 ? 0 : version_ + skipped_rounds_; }

  const MixingRound& round() const { return topology_.round(version_ + skipped_rounds_); }
  int number() const { return number_; }  // this rank's, in the topology
  const Topology& topology() const { return topology_; }
  // The ranks that have not been removed. Collective over them when some have been since the last call.
  const Group& remaining();
  const ExchangeStatistics& statistics() const { return statistics_; }
  void leave();

 private:
  bool pushes() const { return topology_.kind() == Stochastic::column; }
  GossipChannel::Limit limit() const;
  Gathered gather_differences(size_t buffer);
  void count(int64_t version, ExchangeStatistics& statistics) const;

  Group group_;
  Topology topology_;
  double timeout_seconds_;
  std::vector<GossipBuffer> buffers_;
  std::vector<at::Tensor> others_;   // one per dtype, as large as the largest buffer
  std::vector<GossipBuffer> shown_;  // what the channel has of them
  std::unique_ptr<GossipChannel> channel_;
  int64_t version_ = 0;
  int64_t skipped_rounds_ = 0;
  std::vector<int> members_;  // rank of the group, by number in the topology
  int number_;
  std::optional<Group> remaining_;
  std::vector<double> mass_;          // push-sum's weight of each buffer
  std::vector<PublicCopies> copies_;  // of each buffer, where exchanges are compressed
  ExchangeStatistics statistics_;
};

}  // namespace shoal
