#pragma once
// Communication hooks: what takes the place of the mean of gradients, and of the broadcast of buffers.

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <torch/types.h>
#include <vector>

#include "shoal/detail/range.h"
#include "shoal/group.h"

namespace shoal {

// Communication hooks: they take over what a strategy does with a bucket of gradients. After the hooks of PyTorch's
// DistributedDataParallel.

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

// What takes over the broadcast of rank 0's buffers. After the buffer hooks of PyTorch's DistributedDataParallel.

// When a buffer hook is called, of a step that synchronises: before forward, which waits for it; or after it, and then
// it has until the end of backward.
enum class BufferHookLocation { pre_forward, post_forward };

struct NamedBuffer {
  std::string name;
  at::Tensor buffer;  // the module's own
};

// Makes buffers what they should be on all ranks. Derive from it; members are its state.
class BufferHook {
 public:
  virtual ~BufferHook() = default;
  // lead: the lowest rank that has a batch (Join; else 0). Collective: the same calls on every rank, also on one whose
  // forward has failed or that has no batch.
  virtual PendingExchange begin(const Group& group, const std::vector<NamedBuffer>& buffers, int lead,
                                const Label& label) = 0;
};

// Gradients that travel, and are added up, in 16 bits.

// Half the bytes of float32; gradients that have 16 bits travel as they are. Gradients come divided by the number of
// ranks, so that sums stay in the range of float16 where means do. grad() and what micro-batches add up on a rank keep
// the parameter's dtype. Extra memory: the 16-bit copies of the buckets in flight, kept for the next ones.
class CompressHook : public CommunicationHook {
 public:
  // dtype: float16 or bfloat16; UsageError otherwise.
  explicit CompressHook(at::ScalarType dtype);
  ~CompressHook() override;
  std::string name() const override;
  PendingExchange begin(const GradientBucket& bucket) override;

 private:
  struct Spare;
  at::ScalarType dtype_;
  std::shared_ptr<Spare> spare_;
};

// Gradients that travel as integers of 8 bits, with a scale per block (Dettmers: "8-Bit Approximations for Parallelism
// in Deep Learning", ICLR 2016; in two rounds as in Bagua's ByteGrad, VLDB 2021).

struct QuantizeOptions {
  int64_t block = 256;         // elements that share a scale of 4 bytes: their largest absolute value / 127
  bool error_feedback = true;  // what rounding loses goes into the next step's gradient

  // Throws UsageError that lists all faults.
  void validate() const;
};

// Every rank gets all ranks' integers of its own part (an all-to-all) and adds them up in float32, in rank order. Where
// every rank needs the whole sum, the parts' sums travel as integers once more (an all-gather), whose rounding is not
// fed back. An owner gets everything from all. About a quarter of the bytes of float32, in one or two rounds.
//
// State: by parameter, what is owed to it; see PowerSgdHook for its units.
class QuantizeHook : public CommunicationHook {
 public:
  explicit QuantizeHook(const QuantizeOptions& options = {});
  ~QuantizeHook() override;
  std::string name() const override;
  PendingExchange begin(const GradientBucket& bucket) override;
  void reset() override;
  State state() const override;
  void load_state(const State& state) override;

 private:
  struct Memory;
  QuantizeOptions options_;
  std::unique_ptr<Memory> memory_;
};

// The largest elements of each gradient travel, the others wait (Stich, Cordonnier, Jaggi: "Sparsified SGD with
// Memory", NeurIPS 2018; Lin et al.: "Deep Gradient Compression", ICLR 2018).

struct TopKOptions {
  double fraction = 0.01;      // of each parameter's elements, above 0 and at most 1; at least one element
  bool error_feedback = true;  // what does not travel goes into the next step's gradient

  // Throws UsageError that lists all faults.
  void validate() const;
};

// Each rank sends its own choice, with positions of 4 bytes, to all ranks, which add them up in rank order; to the
// owner alone where only it gets the sum. Where ranks get a part of the sum each, they take it from what all get: a
// reduce-scatter cannot know which elements come.
//
// State: by parameter, what is owed to it; see PowerSgdHook for its units.
class TopKHook : public CommunicationHook {
 public:
  explicit TopKHook(const TopKOptions& options = {});
  ~TopKHook() override;
  std::string name() const override;
  PendingExchange begin(const GradientBucket& bucket) override;
  void reset() override;
  State state() const override;
  void load_state(const State& state) override;

 private:
  struct Memory;
  TopKOptions options_;
  std::unique_ptr<Memory> memory_;
};

// PowerSGD: gradients of matrices travel as the product of two thin ones (Vogels, Karimireddy, Jaggi: "PowerSGD:
// Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS 2019).

struct PowerSgdOptions {
  int64_t rank = 1;                 // columns of the two factors; of a smaller matrix, all that it has
  int64_t start_iteration = 1000;   // steps before, which sum up as without compression
  double min_compression_rate = 2;  // a matrix of n x m is compressed where (n + m) * rank * rate < n * m; other
                                    // gradients travel whole
  bool error_feedback = true;       // what the factors leave out goes into the next step's gradient
  bool warm_start = true;           // start from the last step's factor; off: from a random one
  bool batched = false;             // a whole bucket is one square matrix: cheaper and less exact; rate has no effect
  uint64_t seed = 0;                // of the random factors; equal on all ranks

  // Throws UsageError that lists all faults.
  void validate() const;
};

// For those who want whole sums on every rank. A gradient of more than two dimensions is a matrix with its first one as
// rows. Two collectives a bucket: what is not compressed with the first factors, then the second ones; they travel
// through `carrier`, for example a CompressHook. With a rank as large as the matrices', exact but for rounding.
//
// State: by parameter, what is owed to it and its second factor, the same on all ranks; the number of steps. What is
// owed is in the units of the sums it was left out of: where the weights of a mean or a loss scale change between
// steps, its part changes with them.
class PowerSgdHook : public CommunicationHook {
 public:
  explicit PowerSgdHook(const PowerSgdOptions& options = {},
                        std::shared_ptr<CommunicationHook> carrier = std::make_shared<SumHook>());
  ~PowerSgdHook() override;
  std::string name() const override;
  bool serves(SumFor sum_for) const override { return sum_for == SumFor::everybody; }
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

// Post-local SGD: after some steps ranks add up gradients within small groups only, and average their parameters from
// time to time (Lin, Stich, Patel, Jaggi: "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020).

// From step `start_iteration` (0: the first) on, sums are over `local` alone, scaled up to means over it; before, over
// all ranks. Both travel through `carrier`. For those who want whole sums on every rank. A PeriodicModelAverager brings
// the sub-groups' parameters together again.
//
// With weights, a sub-group's gradient is divided by the mean over sub-groups of their weights: so the average over
// sub-groups is the exact weighted mean over all ranks.
class PostLocalSgdHook : public CommunicationHook {
 public:
  // local: of the same size on all ranks, for example Group::by_host(). UsageError for a negative start.
  PostLocalSgdHook(Group local, int64_t start_iteration,
                   std::shared_ptr<CommunicationHook> carrier = std::make_shared<SumHook>());
  ~PostLocalSgdHook() override;
  std::string name() const override;
  bool serves(SumFor sum_for) const override { return sum_for == SumFor::everybody; }
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

// Averages parameters over ranks every `period` steps: after those whose number, from 0, is warmup_steps, warmup_steps +
// period, and so on. So the first average follows the first step after the warm-up, as in PyTorch.
class PeriodicModelAverager {
 public:
  // warmup_steps: before the first average, usually the hook's start_iteration. UsageError for period < 1 or a negative
  // warm-up.
  PeriodicModelAverager(Group group, int64_t period, int64_t warmup_steps = 0);
  // After every optimizer step. Floating-point parameters become their means over the ranks when it is time: then
  // collective, and true.
  bool average(const std::vector<at::Tensor>& parameters);

 private:
  Group group_;
  int64_t period_;
  int64_t warmup_steps_;
  int64_t steps_ = 0;
};

}  // namespace shoal
