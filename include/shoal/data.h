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

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
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
// libtorch's DistributedRandomSampler is another one: without repetitions it leaves out the same samples in every epoch,
// with more than twice as many ranks as samples it gives indices beyond the end, and its only seed is the epoch.
//
// Usable as torch::data::samplers::Sampler<>. A data loader works on a copy of the sampler, made when the loader is
// made. Its reset() takes the epoch and the place that set_epoch() and seek() have named since in the sampler that it was
// copied from, unless they have been called of the copy itself. Where the ranks of an elastic job have changed since, it is a
// UsageError: it would take samples twice, and others never. Copyable. Not collective. Not thread-safe.
class DistributedSampler : public torch::data::samplers::DistributedSampler<> {
 public:
  // size: samples of the data set. UsageError for a data set without samples, a rank that is not below num_replicas,
  // and drop_last with pad = false.
  DistributedSampler(size_t size, size_t num_replicas, size_t rank, const DistributedSamplerOptions& options = {});
  // For the ranks of `group`.
  DistributedSampler(size_t size, const Group& group, const DistributedSamplerOptions& options = {});

  // Begins the present epoch, with its first sample or where seek() said. Data loaders call this themselves.
  // new_size: another size of the data set from now on. UsageError in a copy that has the division of an elastic job's
  // former ranks; a divide() of its own, or copying the sampler again, ends that.
  void reset(std::optional<size_t> new_size = std::nullopt) override;
  // Another order of the samples; each epoch begins with it. Call reset() in a loop that has no set_epoch().
  void set_epoch(size_t epoch);
  // The next samples, fewer at the end of the epoch; nothing after it, until set_epoch() or reset() begins one.
  std::optional<std::vector<size_t>> next(size_t batch_size) override;

  // This rank's samples in the present epoch; Python's len(sampler).
  size_t num_samples() const { return samples_from(first_place()); }
  // How many of them are no repetition; these come first (not with divide_shares()). For evaluation, where each sample
  // must count once.
  size_t unpadded() const;
  // This rank's samples from where the present epoch begins, here and in copies: what a data loader takes that is made now.
  size_t left() const;
  // This rank's samples taken so far in this epoch. A data loader takes batches ahead of the loop.
  size_t index() const { return divided_ == epoch_ ? index_ : 0; }

  // To resume in the middle of an epoch: this epoch, here and in copies, begins behind the first `index` samples. Once a
  // pass has come to its end, further passes begin at their start, as do later epochs. With another number of ranks, scale
  // the index by old ranks / new ranks. UsageError for more than num_samples(); an epoch's last batch may be smaller:
  //
  //   sampler.set_epoch(epoch);
  //   sampler.seek(std::min(batches_done * batch_size, sampler.num_samples()));
  void seek(size_t index);

  // Shares out the rest of the present epoch among other ranks, here and in copies: the first `taken` places of the
  // epoch's common order are done, and rank r takes the places taken + r, taken + r + num_replicas, ... of it, so that
  // every sample is taken once whatever the number of ranks was before. Padding and drop_last apply to the rest. Later
  // epochs are shared out as a whole. For elastic jobs; index() and seek() count within the rest. UsageError as for the
  // constructor.
  void divide(size_t num_replicas, size_t rank, size_t taken = 0);
  // As divide(num_replicas, ...), with fewer ranks, which stand in for those that are missing: rank r has the shares of
  // ranks r, r + ranks, r + 2 * ranks, ... below num_replicas. Its samples are, step by step, `batch` of each share in
  // turn (fewer in the last step), so that the samples of a step over all ranks are those of num_replicas ranks.
  void divide_shares(size_t num_replicas, size_t ranks, size_t rank, size_t batch, size_t taken = 0);
  // Shares that this rank has: 1 without divide_shares().
  size_t shares() const;
  // Places of the present epoch's common order that are done once every rank has taken index() samples of it (with
  // divide_shares(): of whole steps).
  size_t taken() const { return first_place() + index() / shares() * num_replicas_; }
  size_t size() const { return size_; }  // samples of the data set
  size_t num_replicas() const { return num_replicas_; }
  size_t rank() const { return rank_; }
  const DistributedSamplerOptions& options() const { return options_; }
  // Other options from now on; the present epoch goes on at its place. UsageError as for the constructor.
  void set_options(const DistributedSamplerOptions& options);

  // Epoch, index() and the place of divide(). load() restores them, as set_epoch(), divide() and seek() do; with a
  // UsageError it changes nothing. A data loader advances its copy and not this sampler: call
  // seek() as above before saving.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  // A copy that goes on alone: what is called of this sampler and its copies from now on does not concern it.
  DistributedSampler clone() const;

 private:
  friend class Elastic;
  friend class GlobalBatch;  // of Elastic

  // Which division among an elastic job's ranks this sampler has. Copies share the number of the newest one. Moving copies,
  // too, so that what has been moved from remains a sampler.
  class JobDivision {
   public:
    JobDivision() = default;
    JobDivision(const JobDivision&) = default;
    JobDivision& operator=(const JobDivision&) = default;
    ~JobDivision() = default;
    void outdate() { ++*newest_; }
    void renew() { own_ = *newest_; }
    bool outdated() const { return own_ != *newest_; }

   private:
    std::shared_ptr<std::atomic<uint64_t>> newest_ = std::make_shared<std::atomic<uint64_t>>(0);
    uint64_t own_ = 0;
  };
  bool names_epochs() const { return named_ || epoch_ > 0; }

  DistributedSamplerOptions options_;
  std::vector<size_t> indices_;
  size_t index_ = 0;
  size_t divided_ = 0;  // epoch whose indices these are
  size_t first_ = 0;    // place at which their division begins
  bool named_ = false;  // set_epoch() was called

  // Where an epoch begins: its division at a place, and this rank behind so many samples of it. Shared with copies.
  struct Begin {
    size_t epoch;
    size_t first;
    size_t index;
    bool sought = false;                   // by seek() or load()
    std::atomic<bool> index_used = false;  // a pass that began behind them has come to its end
  };
  // What set_epoch() and seek() say to copies that there are already. A copy hears the sampler that it was copied from, and
  // what that one hears, until something is said to itself.
  class Words {
   public:
    Words();
    Words(const Words& of);
    Words& operator=(const Words& of);
    ~Words() = default;
    void say(size_t epoch, std::shared_ptr<Begin> begin);
    // What is new since the last call, or the copy; false: nothing. begin: nullptr: none was sought.
    bool hear(size_t& epoch, std::shared_ptr<Begin>& begin);

   private:
    struct Place;
    std::shared_ptr<Place> own_;
    uint64_t heard_ = 0;
  };
  // The ranks that there are, and the samples of a share in a step; none: num_replicas_ ranks.
  struct StandsIn {
    size_t ranks;
    size_t batch;
  };
  // Place at which the division of the present epoch begins. An epoch that set_epoch() has named and no reset() has
  // begun is whole.
  size_t first_place() const { return divided_ == epoch_ ? first_ : 0; }
  // This rank's places from `first`, where a division begins, to before `end`.
  size_t places_between(size_t first, size_t end) const;
  // This rank's samples in an epoch whose division begins at a place.
  size_t samples_from(size_t first) const;
  // The beginning of the present epoch, unless that is its first place.
  Begin* begin() const { return begin_ && begin_->epoch == epoch_ ? begin_.get() : nullptr; }
  void begin_epoch(std::optional<size_t> new_size = std::nullopt);
  void begin_at(size_t first, size_t index, bool sought = false);
  void hear();
  void say() { words_.say(epoch_, begin_ && begin_->sought ? begin_ : nullptr); }
  // UsageError if this rank has fewer than `index` samples from `first` on.
  void require_within(size_t index, size_t first) const;
  std::shared_ptr<Begin> begin_;
  Words words_;
  std::optional<StandsIn> stands_in_;
  JobDivision job_division_;
};

}  // namespace shoal
