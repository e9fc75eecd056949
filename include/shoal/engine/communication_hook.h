#pragma once
// Communication hooks: they take over what a strategy does with a bucket of gradients. After the hooks of PyTorch's
// DistributedDataParallel.

#include <torch/types.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "shoal/comm/group.h"
#include "shoal/layout/range.h"

namespace shoal {

// Who gets the sum of a bucket.
enum class SumFor {
  everybody,  // every rank, whole: DistributedDataParallel, FSDP's no_shard and hybrid strategies (across hosts)
  parts,      // rank r the r-th of size() equal parts: DistributedOptimizer, other FSDP
  owner,      // one rank, whole: ShardedDataParallel, and the last two for optimizers that are not element-wise
};

// The gradient of one parameter in a bucket, or a part of it.
struct GradientPiece {
  std::string name;     // of the parameter
  at::Tensor gradient;  // its place in the bucket, in the parameter's shape; of a part: [n]
  Range in_bucket;      // elements
  Range in_parameter;   // elements of the parameter, in the order in which they lie in memory
};

// What one rank gives to a sum, and where the sum is wanted.
struct GradientBucket {
  Group group;  // the ranks to sum up over; the hook's collectives go here or to subgroups
  SumFor sum_for = SumFor::everybody;
  int owner = -1;  // SumFor::owner: a rank of the group
  // [n], of one dtype: this rank's gradients, divided by the number of ranks; zero between the pieces. The hook may
  // write to it. Valid until PendingExchange::work has finished, where `sum` is other memory.
  at::Tensor gradients;
  // Where the sum over the ranks belongs. everybody: `gradients` itself; parts: [n / size()], possibly in the memory of
  // `gradients`; owner: `gradients` on the owner, undefined elsewhere.
  at::Tensor sum;
  std::vector<GradientPiece> pieces;
  bool last = false;  // of this step
  Label label;        // for the hook's collectives: step, number of the bucket, names
};

// Communication that has begun.
struct PendingExchange {
  Work work;
  // Called when `work` has finished, at any time: it computes and does not communicate. Not called on a failure.
  std::function<void()> finish{};
  // Called after `finish`, when all buckets of the backward have begun and in their order, so that ranks call the
  // collectives of several buckets in one order.
  std::function<PendingExchange()> further{};

  // Waits and finishes. Again: does nothing.
  void complete();
};

// All of `first`, then `next`.
PendingExchange chain(PendingExchange first, std::function<PendingExchange()> next);

// Sums up a bucket in place of the strategy's own collective. Derive from it; members are its state. Given to a wrapper
// by the option communication_hook, one object to one wrapper. Called by the thread that runs backward, without
// gradients being recorded.
//
// Weights of a mean, unused parameters and abandoned steps do not pass through the hook: with one, they take a small
// all-reduce of their own. So the mean is what the hook's sum gives, divided by the exact weight. Sparse gradients do
// not pass through it either.
class CommunicationHook {
 public:
  using State = std::map<std::string, at::Tensor>;

  virtual ~CommunicationHook() = default;
  // What it is and all that must be equal on all ranks, such as "powersgd, rank 2"; wrappers compare it.
  virtual std::string name() const = 0;
  // Whether it can give the sum to those; wrappers refuse it otherwise.
  virtual bool serves(SumFor) const { return true; }
  // Begins to sum up. Whatever a rank's gradients are, it must call the same collectives as on the other ranks. So an
  // exception, here or in PendingExchange::further, must come before them: it ends the step on all ranks
  // (StepAbandoned elsewhere), for which the same function is called once more, here with zeroes.
  virtual PendingExchange begin(const GradientBucket& bucket) = 0;
  // A step was abandoned, on all ranks: forgets what was carried over from its gradients.
  virtual void reset() {}
  // What is carried from step to step, by names of parameters: for a checkpoint. Each rank has its own.
  virtual State state() const { return {}; }
  // Goes on from there; for all ranks, before the first step. UsageError for what is not this hook's.
  virtual void load_state(const State& state);
};

// The strategy's own collective on other tensors of the shapes of `gradients` and `sum`.
Work sum_up(const GradientBucket& bucket, const at::Tensor& gradients, const at::Tensor& sum);

// Exact: gives the bits that the strategy gives without a hook.
class SumHook : public CommunicationHook {
 public:
  std::string name() const override { return "sum"; }
  PendingExchange begin(const GradientBucket& bucket) override {
    return {sum_up(bucket, bucket.gradients, bucket.sum)};
  }
};

}  // namespace shoal
