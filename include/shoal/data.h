#pragma once
// Sampler that shares a data set out among ranks, after torch.utils.data.distributed.DistributedSampler.
//
//   shoal::DistributedSampler sampler(dataset.size().value(), world.group(), {.seed = 1});
//   for (size_t epoch = 0; epoch < epochs; ++epoch) {
//     sampler.set_epoch(epoch);
//     auto loader = torch::data::make_data_loader(dataset, sampler, torch::data::DataLoaderOptions(64));
//     for (auto& batch : *loader) ...
//   }

#include <torch/data/samplers/distributed.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "shoal/group.h"

namespace shoal {

class Elastic;

struct DistributedSamplerOptions {
  bool shuffle = true;  // an order of its own for each epoch; false: the order of the data set
  uint64_t seed = 0;    // equal on all ranks
  // What happens where the samples do not divide evenly among the ranks. By default the first ones of the epoch's order
  // are taken again, so that all ranks have equally many; unpadded() says how many of a rank's samples are no such
  // repetition.
  bool drop_last = false;  // the last ones of the epoch's order are left out
  bool pad = true;         // false, without drop_last: every sample is taken once, and some ranks have one more
};

// Indices of a rank's samples. All ranks share one order per epoch: torch.randperm of a generator with the seed
// `seed + epoch`; rank r takes its places r, r + num_replicas, r + 2 * num_replicas, ... These are the indices that
// Python's DistributedSampler gives for the same seed, epoch and sizes.
//
// libtorch's DistributedRandomSampler is another one: without repetitions it leaves out the same samples in every
// epoch, with more than twice as many ranks as samples it gives indices beyond the end, and its only seed is the epoch.
//
// Usable as torch::data::samplers::Sampler<>. A data loader works on a copy of the sampler, made when the loader is
// made. Its reset() takes the epoch and the place that set_epoch() and seek() have named since in the sampler that it
// was copied from, unless they have been called of the copy itself. Where the ranks of an elastic job have changed
// since, it is a UsageError: it would take samples twice, and others never. Copyable. Not collective. Not thread-safe.
class DistributedSampler : public torch::data::samplers::DistributedSampler<> {
 public:
  // size: samples of the data set. UsageError for a data set without samples, a rank that is not below num_replicas,
  // and drop_last with pad = false.
  DistributedSampler(size_t size, size_t num_replicas, size_t rank, const DistributedSamplerOptions& options = {});
  // For the ranks of `group`.
  DistributedSampler(size_t size, const Group& group, const DistributedSamplerOptions& options = {});
  DistributedSampler(const DistributedSampler& other);
  DistributedSampler& operator=(const DistributedSampler& other);
  ~DistributedSampler() override;

  // Begins the present epoch, with its first sample or where seek() said. Data loaders call this themselves.
  // new_size: another size of the data set from now on. UsageError in a copy that has the division of an elastic job's
  // former ranks; a redistribute() of its own, or copying the sampler again, ends that.
  void reset(std::optional<size_t> new_size = std::nullopt) override;
  // Another order of the samples; each epoch begins with it. Call reset() in a loop that has no set_epoch().
  void set_epoch(size_t epoch);
  // The next samples, fewer at the end of the epoch; nothing after it, until set_epoch() or reset() begins one.
  std::optional<std::vector<size_t>> next(size_t batch_size) override;

  // This rank's samples in the present epoch; Python's len(sampler).
  size_t num_samples() const;
  // How many of them are no repetition; these come first (not with redistribute_slices()). For evaluation, where each
  // sample must count once.
  size_t unpadded() const;
  // This rank's samples from where the present epoch begins, here and in copies: what a data loader takes that is made
  // now.
  size_t remaining() const;
  // This rank's samples taken so far in this epoch. A data loader takes batches ahead of the loop.
  size_t index() const;

  // To resume in the middle of an epoch: this epoch, here and in copies, begins behind the first `index` samples. Once
  // a pass has come to its end, further passes begin at their start, as do later epochs. With another number of ranks,
  // scale the index by old ranks / new ranks. UsageError for more than num_samples(); an epoch's last batch may be
  // smaller:
  //
  //   sampler.set_epoch(epoch);
  //   sampler.seek(std::min(batches_done * batch_size, sampler.num_samples()));
  void seek(size_t index);

  // Shares out the rest of the present epoch among other ranks, here and in copies: the first `consumed` places of the
  // epoch's common order are done, and rank r takes the places consumed + r, consumed + r + num_replicas, ... of it, so
  // that every sample is taken once whatever the number of ranks was before. Padding and drop_last apply to the rest.
  // Later epochs are shared out as a whole. For elastic jobs; index() and seek() count within the rest. UsageError as
  // for the constructor.
  void redistribute(size_t num_replicas, size_t rank, size_t consumed = 0);
  // As redistribute(num_replicas, ...), with fewer ranks, which stand in for those that are missing: rank r has the
  // slices of ranks r, r + ranks, r + 2 * ranks, ... below num_replicas. Its samples are, step by step, `batch` of each
  // slice in turn (fewer in the last step), so that the samples of a step over all ranks are those of num_replicas
  // ranks.
  void redistribute_slices(size_t num_replicas, size_t ranks, size_t rank, size_t batch, size_t consumed = 0);
  // Slices that this rank has: 1 without redistribute_slices().
  size_t slices() const;
  // Places of the present epoch's common order that are done once every rank has taken index() samples of it (with
  // redistribute_slices(): of whole steps).
  size_t consumed() const;
  size_t size() const { return size_; }  // samples of the data set
  size_t num_replicas() const { return num_replicas_; }
  size_t rank() const { return rank_; }
  const DistributedSamplerOptions& options() const;
  // Other options from now on; the present epoch goes on at its place. UsageError as for the constructor.
  void set_options(const DistributedSamplerOptions& options);

  // Epoch, index() and the place of redistribute(). load() restores them, as set_epoch(), redistribute() and seek() do;
  // with a UsageError it changes nothing. A data loader advances its copy and not this sampler: call seek() as above
  // before saving.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  // A copy that goes on alone: what is called of this sampler and its copies from now on does not concern it.
  DistributedSampler clone() const;

 private:
  friend class Elastic;
  friend class GlobalBatch;  // of Elastic
  struct State;

  // Whether the program has named an epoch by set_epoch().
  bool names_epochs() const;
  // Copies that there are refuse to begin an epoch until they are divided anew.
  void outdate_copies();

  // Place at which the division of the present epoch begins. An epoch that set_epoch() has named and no reset() has
  // begun is whole.
  size_t first_place() const;
  // This rank's places from `first`, where a division begins, to before `end`.
  size_t places_between(size_t first, size_t end) const;
  // This rank's samples in an epoch whose division begins at a place.
  size_t samples_from(size_t first) const;
  void begin_epoch(std::optional<size_t> new_size = std::nullopt);
  void begin_at(size_t first, size_t index, bool sought = false);
  void publish_position();
  // UsageError if this rank has fewer than `index` samples from `first` on.
  void require_within(size_t index, size_t first) const;

  std::unique_ptr<State> state_;
};

}  // namespace shoal
