#pragma once
// Sampler of the samples that a rank trains on, and of their order.
//
// libtorch's DistributedRandomSampler is not used for three reasons: without duplicates it omits the same last samples
// in every epoch; with more than twice as many ranks as samples its indices exceed the end; and its only seed is the
// epoch.

#include <torch/data/samplers/distributed.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace shoal::data {

enum class Order { shuffled, sequential };

// Treatment of samples that do not divide evenly among the ranks.
enum class Remainder {
  wrap,  // the first ones of the epoch's order are used twice
  drop,  // the last ones of the epoch's order are omitted
  keep,  // some ranks get one more: for evaluation, because ranks may then have unequal numbers of batches
};

struct SamplerOptions {
  size_t world = 1;
  size_t rank = 0;
  uint64_t seed = 0;
  Order order = Order::shuffled;
  Remainder remainder = Remainder::wrap;
};

// Rank r takes places r, r + world, ... of an order that all ranks share: torch.randperm seeded with seed + epoch, as
// in Python's DistributedSampler. For libtorch's data loader. Before each epoch call set_epoch(epoch), then reset()
// (which the data loader calls itself). Not collective. One thread at a time.
class ShardedSampler : public torch::data::samplers::DistributedSampler<> {
 public:
  // UsageError unless size > 0 and rank < world.
  ShardedSampler(size_t size, const SamplerOptions& options);

  // Starts the present epoch from its first sample, optionally with another number of samples.
  void reset(std::optional<size_t> new_size = std::nullopt) override;
  // The next samples, fewer at the end of the epoch; nothing after it.
  std::optional<std::vector<size_t>> next(size_t batch_size) override;

  // Number of this rank's samples in an epoch.
  size_t local_size() const { return indices_.size(); }
  // Number of this rank's samples used so far in this epoch.
  size_t index() const { return index_; }
  // Continues as if `index` samples had been used: set_epoch(), reset() and seek() resume a run. UsageError for more
  // than local_size().
  void seek(size_t index);

  // Saves and loads epoch and index.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  const uint64_t seed_;
  const Order order_;
  const Remainder remainder_;
  std::vector<size_t> indices_;
  size_t index_ = 0;
};

}  // namespace shoal::data
