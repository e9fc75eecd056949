#pragma once
// Wrapper and optimizer of an elastic training: what depends on the strategy.

#include <torch/optim/optimizer.h>

#include "shoal/ddp.h"
#include "shoal/world.h"
#include "shoal/zero.h"

namespace shoal {

// DistributedDataParallel with an optimizer that is whole on each rank, or with OSS (ZeRO-1), or ShardedDataParallel with
// OSS (ZeRO-2).
class ElasticParts {
 public:
  // The arguments must outlive this object. UsageError names what is not supported.
  ElasticParts(const World& world, DataParallelCore& parallel, torch::optim::Optimizer& optimizer);
  ~ElasticParts();
  ElasticParts(const ElasticParts&) = delete;
  ElasticParts& operator=(const ElasticParts&) = delete;

  // Whether a rank updates only its share, so that a step that one rank has begun to update needs its commit() on all.
  bool sharded() const { return oss_ != nullptr; }
  // The wrapper if each rank is whole; otherwise nullptr.
  DistributedDataParallelCore* replicated() const { return sharded() ? nullptr : ddp_; }
  // Once the world is that of an elastic job. Collective.
  void guard();
  // Before and after the ranks have met with their gradients. The first returns whether `map` of the second must be true.
  // Afterwards all ranks that live may update, or it is CommError for all of them. Collective.
  bool prepare_commit();
  void commit(bool map);
  // Goes on in another group, after `step` complete steps. It may be called again if it fails. Collective.
  void regroup(const Group& group, int64_t step);

 private:
  DistributedDataParallelCore* ddp_;
  ShardedDataParallelCore* sharded_ddp_;
  OSSCore* oss_;
};

}  // namespace shoal
