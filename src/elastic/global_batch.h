#pragma once
// The samples of a step, over all ranks, and this rank's part of them.

#include <cstdint>
#include <functional>
#include <utility>

#include "elastic/elastic_parts.h"
#include "elastic/step_copies.h"
#include "shoal/data.h"
#include "shoal/world.h"

namespace shoal {

// With a size, the global batch stays as ranks are lost and come: it has a share for each rank of the start, or as many
// as the options say, and each rank computes one or several. Each share weighs the same and has its own random numbers,
// whoever computes it. Without a size every rank has one share, and the batch shrinks with the ranks.
class GlobalBatch {
 public:
  // size: samples of a step; 0: none. shares: 0: one for each rank of now.
  // The arguments must outlive this object.
  GlobalBatch(World world, int64_t size, int64_t shares, ElasticParts& parts, StepCopies& copies);
  // UsageError for a sampler that is not this world's, or gives ranks unequally many samples. nullptr: there is none.
  void require(const DistributedSampler* sampler) const;
  // Samples of a step; 0: none that is kept.
  int64_t size() const { return size_; }
  int64_t first_shares() const { return first_shares_; }
  uint64_t first_seed() const { return seed_; }
  // Those of the job that this process has come to.
  void adopt(int64_t size, int64_t shares, uint64_t seed);
  // Takes rank 0's seed for the random numbers of steps, and its buffers. Collective.
  void begin();

  // Shares of all ranks, and of this one.
  int64_t shares() const { return size_ > 0 ? first_shares_ : world_.size(); }
  int64_t own_shares() const { return shares_of(world_.rank()); }
  int64_t shares_of(int rank) const { return (shares() - rank + world_.size() - 1) / world_.size(); }
  // This rank's samples in a step; UsageError without a size.
  int64_t own_size() const;

  // After a recovery, before divide(): copies of the sampler that have another division refuse to begin. taken: places
  // of the epoch in which the loop is.
  void outdate_copies(DistributedSampler& sampler, size_t taken);
  // Gives the sampler this rank's shares of the epoch's rest, behind `taken` places.
  void divide(DistributedSampler& sampler, size_t taken);
  // A whole epoch follows, by the same division.
  void begin_epoch() { divided_at_ = 0; }
  // UsageError if a step behind `taken` places does not have as many samples of this rank.
  void require(int64_t samples, const DistributedSampler& sampler, size_t taken) const;

  // compute() averages over this rank's shares at once, or gets the samples from `begin` to `end` of one share after
  // the other. step: number of the step.
  void compute(int64_t step, const std::function<void()>& compute);
  void compute(int64_t step, int64_t samples, const std::function<void(int64_t begin, int64_t end)>& compute);
  // After compute(), also one that failed.
  void end_step();

 private:
  void weigh(double shares);
  void share_buffers();
  void seed(int64_t step, int64_t share) const;

  World world_;
  int64_t size_;
  int64_t first_shares_;
  ElasticParts& parts_;
  StepCopies& copies_;
  std::pair<int, int> divided_among_;  // ranks, and this one among them
  uint64_t seed_ = 0;
  size_t divided_at_ = 0;  // places of the epoch that were taken before the sampler's division
};

}  // namespace shoal
