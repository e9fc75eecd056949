#pragma once
// Sampler: the samples that a rank trains on, and their order.
//
// libtorch has DistributedRandomSampler, which is not used for three reasons: without duplicates it leaves out the same
// last samples in every epoch, with more than twice as many ranks as samples it gives indices beyond the end, and its
// only seed is the epoch.

#include <torch/data/samplers/distributed.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace shoal::data {

enum class Order { shuffled, sequential };

// What happens to samples that do not divide evenly among the ranks.
enum class Remainder {
  wrap,  // the first ones of the epoch's order are taken twice
  drop,  // the last ones of the epoch's order are left out
  keep,  // some ranks get one more: for evaluation, as ranks may then have unequal numbers of batches
};

struct SamplerOptions {
  size_t world = 1;
  size_t rank = 0;
  uint64_t seed = 0;
  Order order = Order::shuffled;
  Remainder remainder = Remainder::wrap;
};

// Rank r takes places r, r + world, ... of an order that all ranks share: that of torch.randperm seeded with
// seed + epoch, as Python's DistributedSampler has it. Serves libtorch's data loader. Before each epoch:
// set_epoch(epoch), then reset() (which the data loader calls by itself).
// collective: no. threads: one at a time.
class ShardedSampler : public torch::data::samplers::DistributedSampler<> {
 public:
  // Throws UsageError unless size > 0 and rank < world.
  ShardedSampler(size_t size, const SamplerOptions& options);

  // Starts the present epoch from its first sample, optionally over another number of samples.
  void reset(std::optional<size_t> new_size = std::nullopt) override;
  // The next samples, fewer at the end of the epoch; nothing after it.
  std::optional<std::vector<size_t>> next(size_t batch_size) override;

  // Samples of this rank in an epoch.
  size_t local_size() const { return indices_.size(); }
  // Samples of this rank taken so far in this epoch.
  size_t index() const { return index_; }
  // Goes on as if `index` samples had been taken: set_epoch(), reset() and seek() resume a run. Throws UsageError for
  // more than local_size().
  void seek(size_t index);

  // Epoch and index.
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
