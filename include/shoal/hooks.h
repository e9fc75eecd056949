#pragma once
// Communication hooks: replacements for the reduction of gradients and for the broadcast of buffers, after those of
// PyTorch's DistributedDataParallel.

#include <torch/types.h>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "shoal/detail/range.h"
#include "shoal/group.h"

namespace shoal {

// Ranks that have the sum of a bucket after its reduction.
enum class SumResult {
  all_ranks,  // every rank has all of it (all-reduce): DistributedDataParallel; FSDP's no_shard and hybrid strategies,
              // across hosts
  ranges,  // rank r has the r-th of size() equal ranges (reduce-scatter): DistributedOptimizer, other FSDP strategies
  owner,   // one rank has all of it (reduce): ShardedDataParallel; the previous two for optimizers that are not
           // element-wise
};

// Gradient of one parameter in a bucket, or a part of it.
struct GradientPiece {
  std::string name;     // of the parameter
  at::Tensor gradient;  // view of the bucket in the parameter's shape; for a part: [n]
  Range in_bucket;      // elements
  Range in_parameter;   // elements of the parameter, in memory order
};

// Bucket of gradients of one rank, to be summed over ranks.
struct GradientBucket {
  Group group;  // ranks to sum over; the hook's collectives use this group or its subgroups
  SumResult result = SumResult::all_ranks;
  int owner = -1;  // SumResult::owner: a rank of the group
  // [n], of one dtype: this rank's gradients divided by the number of ranks; zero between the pieces. The hook may
  // write to it. Valid until PendingExchange::work has finished if `sum` has other memory.
  at::Tensor gradients;
  // Destination of the sum. all_ranks: `gradients` itself; ranges: [n / size()], possibly a view of `gradients`; owner:
  // `gradients` on the owner, undefined elsewhere.
  at::Tensor sum;
  std::vector<GradientPiece> pieces;
  bool last = false;  // last bucket of this step
  Label label;        // for the hook's collectives: step, bucket number, names
};

// Communication in flight.
struct PendingExchange {
  Work work;
  // Called at any time after `work` has finished, to compute. It must not communicate. Not called on a failure. What it
  // throws ends the step on all ranks.
  std::function<void()> finish{};
  // Next stage of the communication. Called after `finish`, once all buckets of the backward have started, and in
  // bucket order, so that all ranks call the collectives of several buckets in the same order.
  std::function<PendingExchange()> next_stage{};

  // Waits for `work` and calls `finish`. A second call does nothing.
  void complete();
};

// Communication that runs all stages of `first`, then `next`.
PendingExchange chain(PendingExchange first, std::function<PendingExchange()> next);

// Base class of communication hooks: a hook reduces a bucket instead of the strategy's own collective. Members of a
// derived class are its state. Pass it to a wrapper as the option communication_hook; one that has memory serves one
// wrapper at a time. It is called by the thread that runs backward, with gradient recording off.
//
// Weights of a mean, unused parameters and abandoned steps do not pass through the hook: they take a small all-reduce
// of their own, and the result of the hook is divided by the exact weight. Sparse gradients do not pass through it
// either.
class CommunicationHook {
 public:
  using State = std::map<std::string, at::Tensor>;

  virtual ~CommunicationHook() = default;
  // Name with all settings that must be equal on all ranks, such as "powersgd, rank 2"; wrappers compare it over ranks.
  virtual std::string name() const = 0;
  // True if the hook supports this destination; otherwise wrappers reject it.
  virtual bool serves(SumResult) const { return true; }
  // Starts the reduction. All ranks must call the same collectives, whatever their gradients are. An exception, here or
  // in PendingExchange::next_stage, must therefore be thrown before any collective: it ends the step on all ranks
  // (StepAbandoned elsewhere), and the function is called once more, here with zeros, to match the other ranks.
  virtual PendingExchange begin(const GradientBucket& bucket) = 0;
  // Called after a step was abandoned on all ranks: drops what was carried over from its gradients.
  virtual void reset() {}
  // State that is carried from step to step, by parameter name, for checkpoints. It differs between ranks.
  virtual State state() const { return {}; }
  // Restores the state. Call it on all ranks before the first step. Throws UsageError for a state that is not this
  // hook's.
  virtual void load_state(const State& state);
  // Those of this hook and its carriers that keep something from step to step, by parameter name or as a number of
  // steps. A second wrapper with one of them is refused (UsageError) as long as the first one lives, unless it has the
  // same module. Override it in a hook that keeps nothing and may therefore be shared, with an empty list, and in every
  // hook with a carrier, which adds its carrier's with_memory() to its own: a carrier that is not in the list is not
  // watched, and mixes the gradients of two wrappers that share it.
  virtual std::vector<const CommunicationHook*> with_memory() const { return {this}; }
  // False if buckets of this group are summed, in some steps, over a part of its ranks only, which then train apart. A
  // hook that has a carrier asks it.
  virtual bool sums_over_all(const Group&) const { return true; }
};

// Runs the strategy's own collective on tensors with the shapes of `gradients` and `sum`.
Work sum_up(const GradientBucket& bucket, const at::Tensor& gradients, const at::Tensor& sum);

// Hook without effect: the result is bit-equal to that without a hook.
class SumHook : public CommunicationHook {
 public:
  std::string name() const override { return "sum"; }
  std::vector<const CommunicationHook*> with_memory() const override { return {}; }
  PendingExchange begin(const GradientBucket& bucket) override {
    return {sum_up(bucket, bucket.gradients, bucket.sum)};
  }
};

// Time at which a buffer hook is called in a synchronising step: before forward, which waits for it, or after forward,
// with completion at the end of backward.
enum class BufferHookLocation { pre_forward, post_forward };

struct NamedBuffer {
  std::string name;
  at::Tensor buffer;  // the module's own
};

// Base class of hooks that synchronise buffers, after the buffer hooks of PyTorch's DistributedDataParallel. Members of
// a derived class are its state.
class BufferHook {
 public:
  virtual ~BufferHook() = default;
  // Starts the synchronisation. lead: the lowest rank that has a batch (in a Join; otherwise 0). Collective: every rank
  // makes the same calls, also a rank whose forward has failed or that has no batch.
  virtual PendingExchange begin(const Group& group, const std::vector<NamedBuffer>& buffers, int lead,
                                const Label& label) = 0;
};

// Compression to 16 bits: gradients are reduced in float16 or bfloat16; 16-bit gradients are unchanged. Gradients
// arrive divided by the number of ranks, so sums stay in the range of float16 if the means do. grad() and accumulated
// micro-batches keep the parameter's dtype. Extra memory: the 16-bit copies of the buckets in flight, which are reused.
class CompressHook : public CommunicationHook {
 public:
  // dtype: float16 or bfloat16; throws UsageError otherwise.
  explicit CompressHook(at::ScalarType dtype);
  ~CompressHook() override;
  std::string name() const override;
  std::vector<const CommunicationHook*> with_memory() const override { return {}; }
  PendingExchange begin(const GradientBucket& bucket) override;

 private:
  struct Spare;
  at::ScalarType dtype_;
  std::shared_ptr<Spare> spare_;
};

struct QuantizeOptions {
  int64_t block = 256;         // elements per scale of 4 bytes, which is their largest absolute value / 127
  bool error_feedback = true;  // add the rounding error to the next step's gradient

  // Throws UsageError with a list of all invalid options.
  void validate() const;
};

// Compression to 8-bit integers with a scale per block. Source: Dettmers, "8-Bit Approximations for Parallelism in Deep
// Learning" (ICLR 2016), in two rounds as in Bagua's ByteGrad (VLDB 2021).
//
// Every rank receives all ranks' integers of its own part (all-to-all) and sums them in float32, in rank order. If
// every rank needs the full sum, the sums of the parts are quantized and gathered (all-gather); the error of this
// second rounding is not fed back. An owner receives everything from all ranks. About a quarter of the bytes of
// float32, in one or two rounds.
//
// State: the error of each parameter; see PowerSgdHook for its units.
class QuantizeHook : public CommunicationHook {
 public:
  explicit QuantizeHook(const QuantizeOptions& options = {});
  ~QuantizeHook() override;
  std::string name() const override;
  std::vector<const CommunicationHook*> with_memory() const override;
  PendingExchange begin(const GradientBucket& bucket) override;
  void reset() override;
  State state() const override;
  void load_state(const State& state) override;

 private:
  struct Memory;
  QuantizeOptions options_;
  std::unique_ptr<Memory> memory_;
};

struct TopKOptions {
  double fraction = 0.01;      // fraction of each parameter's elements, in (0, 1]; at least one element
  bool error_feedback = true;  // add the elements that are not sent to the next step's gradient

  // Throws UsageError with a list of all invalid options.
  void validate() const;
};

// Top-k sparsification: only the largest elements of each gradient are sent. Source: Stich, Cordonnier, Jaggi,
// "Sparsified SGD with Memory" (NeurIPS 2018); Lin et al., "Deep Gradient Compression" (ICLR 2018).
//
// Each rank sends its own selection, with positions of 4 bytes, to all ranks, which sum them in rank order; or to the
// owner only, if only it needs the sum. If ranks need a part each, they still receive all selections, because a
// reduce-scatter cannot know the positions in advance.
//
// State: the error of each parameter; see PowerSgdHook for its units.
class TopKHook : public CommunicationHook {
 public:
  explicit TopKHook(const TopKOptions& options = {});
  ~TopKHook() override;
  std::string name() const override;
  std::vector<const CommunicationHook*> with_memory() const override;
  PendingExchange begin(const GradientBucket& bucket) override;
  void reset() override;
  State state() const override;
  void load_state(const State& state) override;

 private:
  struct Memory;
  TopKOptions options_;
  std::unique_ptr<Memory> memory_;
};

struct PowerSgdOptions {
  int64_t rank = 1;                 // columns of the two factors; at most the rank of the matrix
  int64_t start_iteration = 1000;   // number of steps before compression starts
  double min_compression_rate = 2;  // compress a matrix of n x m if (n + m) * rank * rate < n * m; other gradients are
                                    // sent uncompressed
  bool error_feedback = true;       // add the compression error to the next step's gradient
  bool warm_start = true;           // start from the factor of the last step; off: from a random one
  bool batched = false;             // treat a whole bucket as one square matrix: cheaper and less exact;
                                    // min_compression_rate has no effect
  uint64_t seed = 0;                // seed of the random factors; equal on all ranks

  // Throws UsageError with a list of all invalid options.
  void validate() const;
};

// PowerSGD: gradients of matrices are sent as the product of two low-rank factors. Source: Vogels, Karimireddy, Jaggi,
// "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization" (NeurIPS 2019). Supports
// SumResult::all_ranks only.
//
// A gradient with more than two dimensions is a matrix with its first dimension as rows. There are two collectives per
// bucket: the uncompressed gradients together with the first factors, then the second factors; both go through
// `carrier`, for example a CompressHook. With the full rank of the matrices it is exact up to rounding.
//
// State: by parameter, the error and the second factor, which is equal on all ranks; and the number of steps. The error
// is in the units of the sum that it was left out of: if the weights of a mean or the loss scale change between steps,
// its contribution changes with them.
class PowerSgdHook : public CommunicationHook {
 public:
  explicit PowerSgdHook(const PowerSgdOptions& options = {},
                        std::shared_ptr<CommunicationHook> carrier = std::make_shared<SumHook>());
  ~PowerSgdHook() override;
  std::string name() const override;
  std::vector<const CommunicationHook*> with_memory() const override;
  bool serves(SumResult result) const override { return result == SumResult::all_ranks; }
  bool sums_over_all(const Group& group) const override { return carrier_->sums_over_all(group); }
  PendingExchange begin(const GradientBucket& bucket) override;
  void reset() override;
  State state() const override;
  void load_state(const State& state) override;

 private:
  struct Memory;
  PowerSgdOptions options_;
  std::shared_ptr<CommunicationHook> carrier_;
  std::shared_ptr<Memory> memory_;
};

// Post-local SGD: from step `start_iteration` on (0: the first), gradients are averaged over the group `local` only,
// scaled to the mean over it; before that, over all ranks. A PeriodicModelAverager averages the parameters of the
// subgroups. Source: Lin, Stich, Patel, Jaggi, "Don't Use Large Mini-Batches, Use Local SGD" (ICLR 2020). Both
// reductions go through `carrier`. Supports SumResult::all_ranks only.
//
// Not for OSS, whose step throws UsageError, unless `local` is all ranks: it updates each parameter on one rank for
// all, by the gradients of that rank's subgroup alone. Under the hybrid strategies of FullyShardedDataParallel, `local`
// has to lie within the ranks that have the same shard.
//
// With weights, the gradient of a subgroup is divided by the mean weight of all subgroups, so that the average over
// subgroups is the exact weighted mean over all ranks.
class PostLocalSgdHook : public CommunicationHook {
 public:
  // local: group of the same size on all ranks, for example Group::by_host(). Throws UsageError for a negative start.
  PostLocalSgdHook(Group local, int64_t start_iteration,
                   std::shared_ptr<CommunicationHook> carrier = std::make_shared<SumHook>());
  ~PostLocalSgdHook() override;
  std::string name() const override;
  std::vector<const CommunicationHook*> with_memory() const override;
  bool serves(SumResult result) const override { return result == SumResult::all_ranks; }
  bool sums_over_all(const Group& group) const override {
    return local_.size() == group.size() && carrier_->sums_over_all(group);
  }
  PendingExchange begin(const GradientBucket& bucket) override;
  void reset() override { carrier_->reset(); }
  State state() const override;
  void load_state(const State& state) override;

 private:
  struct Memory;
  Group local_;
  int64_t start_;
  std::shared_ptr<CommunicationHook> carrier_;
  std::unique_ptr<Memory> memory_;
};

// Averages parameters over ranks every `period` steps: after steps warmup_steps, warmup_steps + period, ..., counted
// from 0. The first average therefore follows the first step after the warm-up, as in PyTorch. Checkpoints do not have
// the count: docs/checkpoints.md says with which warm-up a new averager goes on.
class PeriodicModelAverager {
 public:
  // warmup_steps: steps before the first average, usually the hook's start_iteration. Throws UsageError for period < 1
  // or a negative warm-up.
  PeriodicModelAverager(Group group, int64_t period, int64_t warmup_steps = 0);
  // Call it after every optimizer step. When an average is due, it is collective, replaces floating-point parameters by
  // their means over the ranks, and returns true.
  bool average(const std::vector<at::Tensor>& parameters);

 private:
  Group group_;
  int64_t period_;
  int64_t warmup_steps_;
  int64_t steps_ = 0;
};

}  // namespace shoal
