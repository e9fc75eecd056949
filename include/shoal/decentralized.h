#pragma once
// DecentralizedDataParallel: every rank trains its own parameters and averages them with a few neighbours, others in
// each step; nothing is synchronised over all ranks. After Lian et al., "Can Decentralized Algorithms Outperform
// Centralized Algorithms?" (NeurIPS 2017), and decent-dp's overlap of the exchange with the next step (Wang et al.,
// ICLR 2025).

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/schedulers/lr_scheduler.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "shoal/detail/data_parallel.h"
#include "shoal/detail/optimizer_state.h"
#include "shoal/group.h"
#include "shoal/precision.h"
#include "shoal/topology.h"

namespace shoal {

struct NamedParameter {
  std::string name;
  at::Tensor parameter;
};

// Makes the optimizer of some of the model's parameters, and its schedule.
using OptimizerOfNamed = std::function<std::unique_ptr<torch::optim::Optimizer>(const std::vector<NamedParameter>&)>;
using ScheduleOf = std::function<std::unique_ptr<torch::optim::LRScheduler>(torch::optim::Optimizer&)>;

// The same options for all parameters: optimizer_with<FusedAdamW>(torch::optim::AdamWOptions(1e-3)).
template <class Optimizer, class Defaults>
OptimizerOfNamed optimizer_with(const Defaults& defaults) {
  return [defaults](const std::vector<NamedParameter>& named) {
    std::vector<at::Tensor> parameters;
    for (const auto& entry : named) parameters.push_back(entry.parameter);
    return std::make_unique<Optimizer>(parameters, defaults);
  };
}

// A bucket that is about to be mixed: x <- own_weight * x + received.
struct PreAverage {
  torch::optim::Optimizer& optimizer;             // the bucket's
  const std::vector<NamedParameter>& parameters;  // x; their gradients are there
  const std::vector<at::Tensor>& received;        // sums of W_ij y_j in the parameters' shapes; may be changed
  double own_weight;                              // W_ii, and the weights of neighbours that are left out
  const MixingRound& round;
  int rank;  // this rank's number in the round
};

// Neighbours get compressed differences to what they know of this rank, and what does not travel goes another time:
// x <- x + rate * sum over j of W_ij (h_j - h_i), where all that read rank i have the same copy h_i of its parameters
// (CHOCO-SGD: Koloskova, Stich, Jaggi, "Decentralized Stochastic Optimization and Gossip Algorithms with Compressed
// Communication", ICML 2019). Costs a copy of the parameters per round of the topology, and one per neighbour and
// round.
struct CompressedExchange {
  std::optional<double> top_k{};  // this part of a bucket's elements travels, the largest differences, in float32;
                                  // none: all, as integers of 8 bits with a scale per 256
  std::optional<double> rate{};  // in (0, 1]; none: 1 for integers, rate_of_top_k; less for a smaller part: where it is
                                 // too large ranks drift apart
  static constexpr double rate_of_top_k = 0.1;
};

enum class ClipScope { all_gradients, bucket };

struct DecentralizedDataParallelOptions {
  // Behaviour.
  std::optional<Topology> topology{};         // of the group's size; none: one-peer-exp
  ScheduleOf schedule{};                      // one step per update; none: the rates stay
  double clip_grad = 0;                       // largest norm of this rank's gradients; 0: no clipping
  ClipScope clip = ClipScope::all_gradients;  // of all together, for which updates wait until backward has ended; or of
                                              // each bucket's, as decent-dp does
  std::optional<GradScalerOptions>
      scaler{};                  // of the loss; a rank that finds inf or NaN mixes, but does not update. The
                                 // others hear of it in the next steps; the scale is theirs too then
  Precision precision{};         // forward computes as `compute` says; converting is the caller's
  bool average_buffers = false;  // global_avg() averages floating-point buffers too
  std::function<void(const PreAverage&)> pre_average_hook{};  // from the second step on
  std::vector<std::string> ignored{};                         // names of parameters and buffers that shoal leaves alone
  double neighbour_timeout_seconds = 5;                       // a neighbour that is later is left out of the step

  // Performance.
  double bucket_cap_mb = 25;                       // MiB of parameters that are updated and shown together
  bool param_as_bucket_view = true;                // parameters lie in their bucket; else they keep their memory
  std::optional<at::ScalarType> exchange_dtype{};  // neighbours get values rounded to this; a rank's own are not
  std::optional<CompressedExchange> compressed_exchange{};  // in its place; for doubly stochastic topologies of at most
                                                            // 16 rounds, and without a pre_average_hook

  // Throws UsageError that lists all faults.
  void validate(int ranks) const;
};

// What exchanges have come to on this rank; one is one bucket from one neighbour.
struct ExchangeStatistics {
  int64_t exchanged = 0;      // of the step that was due
  int64_t newer = 0;          // the neighbour was further on
  int64_t older = 0;          // the last that a late neighbour has shown
  int64_t skipped = 0;        // nothing came in time: this rank's own values stood in
  std::vector<int> removed;   // ranks that have ended or left, for which the topology was rebuilt, and are not back
  std::vector<int> rejoined;  // ranks in whose place a new process has come, for which it was rebuilt again
};

class CheckpointSource;

// What DecentralizedDataParallel does, whatever the module's type.
class DecentralizedDataParallelCore {
 public:
  DecentralizedDataParallelCore(std::shared_ptr<torch::nn::Module> module, OptimizerOfNamed make, const Group& group,
                                const DecentralizedDataParallelOptions& options);
  ~DecentralizedDataParallelCore();
  DecentralizedDataParallelCore(const DecentralizedDataParallelCore&) = delete;
  DecentralizedDataParallelCore& operator=(const DecentralizedDataParallelCore&) = delete;

  // Backward of a loss that is a sum over `weight` samples or tokens, see DecentralizedDataParallel. weight >= 0 and finite.
  void backward(const at::Tensor& loss_sum, double weight);
  // `accumulate` false gives a scope without effect.
  [[nodiscard]] NoSync no_sync(bool accumulate = true);
  // After an exception in forward, backward or a hook on this rank: makes the wrapper ready for the next step. The next
  // forward calls it by itself.
  void reset();
  // Names of the parameters in each bucket.
  std::vector<std::vector<std::string>> buckets() const;
  // Steps finished or abandoned so far.
  int64_t step() const;
  // What this rank knows of the wrapper and its steps. Not collective; between steps.
  LoggingData logging_data() const;

  // Scales a loss as the scaler says; without scaler the loss itself.
  at::Tensor scale_loss(const at::Tensor& loss) const;
  // Gives all ranks the mean of their parameters, bit for bit the same, also before the first step. Training can go on. To
  // be called when ranks have loaded or replaced parameters (torch::load, set_data) after the first step: neighbours would
  // mix what they had before, and forward is a UsageError until then. Collective over the ranks that have not left or
  // ended; UsageError on one that has left.
  void global_avg();
  // How far ranks are from their mean x: sqrt(mean over ranks of |x_i - x|^2), over all parameters. Collective.
  double consensus_distance();
  // A step without a batch, for a rank that has run out of them: it mixes and shows, and does not update; the schedule
  // makes a step. Not collective.
  void pass();
  // This rank trains no more; its neighbours go on without it. Further steps and collectives are a UsageError.
  void leave();

  const ExchangeStatistics& statistics() const;
  const Topology& topology() const;
  // The ranks that have not been removed, in rank order. Collective over them when some have been since the last call.
  const Group& remaining();
  // One per bucket, from the first step on; owned by the wrapper.
  std::vector<torch::optim::Optimizer*> optimizers() const;
  const GradScaler* scaler() const;
  // Of this rank's gradients in the last step, with clip_grad; before clipping.
  double last_norm() const;

  // This rank's optimizer state by parameter names, a copy; and the way back. Before the first step there is none, and
  // what is loaded is kept for it. Not collective.
  OptimizerState state_dict() const;
  void load_state_dict(const OptimizerState& state);

  struct State;

 protected:
  // Around the module's forward.
  void before_forward();
  void after_forward(const std::vector<at::Tensor>& outputs);
  void forward_failed();
  const Precision& precision() const;
  at::DeviceType device() const;

 private:
  friend std::shared_ptr<CheckpointSource> checkpoint_source(DecentralizedDataParallelCore& parallel);
  std::unique_ptr<State> state_;
};

// For TrainingState. Every rank's parameters and optimizer state are saved, beside the parameters' mean, which other
// strategies get.
std::shared_ptr<CheckpointSource> checkpoint_source(DecentralizedDataParallelCore& parallel);

//   shoal::DecentralizedDataParallel parallel(
//       model, shoal::optimizer_with<shoal::FusedAdamW>(torch::optim::AdamWOptions(1e-3)), world.group(),
//       {.topology = shoal::make_topology("ring", world.size())});
//   ...
//   cross_entropy(parallel.forward(x), y).backward();  // mixes, updates and shows, bucket by bucket
//
// There is no optimizer to step: with x a bucket's parameters on this rank, g its gradient at x, W the round's weights
// and y_j what neighbour j has shown after its last step, backward does, as soon as the bucket's last gradient is
// there,
//   x <- W_ii x + sum over j of W_ij y_j;  x <- optimizer(x, g);  show x
// and drops the gradient: grad() is a tensor without memory until the next backward. It can be zeroed and dropped; what
// reads it (torch::nn::utils::clip_grad_norm_) is a UsageError that names clip_grad, and so is the next backward where
// those of some parameters only have been zeroed or dropped. Hooks of parameters see gradients, and may change them.
// What was shown after step k is mixed with round k, counted from the topology's first, in step
// k + 1; so the first step mixes nothing, and exchanges have a whole step's time. Gradients of parameters that a step
// does not use are none: they are mixed and not updated. Ranks may use different modules. A parameter that backward
// reaches several times is updated after the last (known from the first step; one that comes more often later is a
// UsageError).
//
// A neighbour that is late by neighbour_timeout_seconds is left out, its weight is this rank's own then, and it is not
// waited for again until it has caught up: of a late neighbour the last that it has shown is taken, once. One that has
// ended is removed, and the topology rebuilt for the others. Only the constructor, the first step (ranks agree on the
// buckets: rank 0's order of gradients), global_avg() and consensus_distance() are collective, and need all ranks that
// have not been removed.
//
// backward(loss_sum, weight): every rank divides its sum by the mean of the ranks' weights per step, so that the mean of
// the ranks' gradients is sum / sum of weights. Ranks tell each other their weights in the first step and with what they
// show later; of weights that change it is the running mean (a tenth of each step), since nobody waits to know. So it is
// exact in the first step and while each rank's weight stays, or weights change places over a complete topology. It is
// the gradient that is weighted: an optimizer that makes up for a gradient's size (Adam) undoes it.
//
// What torch::autograd::grad computes is no step.
//
// Ranks with unequal numbers of batches need no Join: one that has run out leave()s, and the others mix among
// themselves from then on (a mean over those that have batches); or it pass()es until all have made as many steps as
// the one with the most, on which they agree beforehand (a mean over all).
//
// A rank whose process has died can come back as a new one (WorldOptions::rejoin) that makes the same wrapper: its
// constructor takes a neighbour's parameters, buffers, optimizer state, scaler, step and place in the topology, and the
// others count it in from one common step on. They notice it between steps, within 0.2 s and their next step; the
// neighbour's step takes longer by the copy. Rates are as its options and the schedule say. The constructor is not
// collective then: CommError when ranks do not answer within rendezvous_timeout_seconds, DisagreeError for another
// model or topology. One such wrapper per group.
//
// Constructor: gives everybody rank 0's values. UsageError for wrong options, for a topology of another size and for
// complex parameters; DisagreeError when ranks hold different models, topologies or options of the exchange. Not
// thread-safe. The destructor
// leaves: neighbours go on without this rank.
template <class Module>
class DecentralizedDataParallel : public DataParallelWrapper<Module, DecentralizedDataParallelCore> {
  using Base = DataParallelWrapper<Module, DecentralizedDataParallelCore>;

 public:
  using Options = DecentralizedDataParallelOptions;

  DecentralizedDataParallel(std::shared_ptr<Module> module, OptimizerOfNamed make, const Group& group,
                            const Options& options = {})
      : Base(std::move(module), std::move(make), group, options) {}
  DecentralizedDataParallel(const torch::nn::ModuleHolder<Module>& module, OptimizerOfNamed make, const Group& group,
                            const Options& options = {})
      : Base(module.ptr(), std::move(make), group, options) {}

  template <detail::BareModule Bare, class... Rest>
  explicit DecentralizedDataParallel(Bare&& module, Rest&&... rest)
      : DecentralizedDataParallel(detail::refuse_bare_module<Bare>(module), std::forward<Rest>(rest)...) {}
};

template <class Module>
DecentralizedDataParallel(const torch::nn::ModuleHolder<Module>&, OptimizerOfNamed, const Group&,
                          const DecentralizedDataParallelOptions& = {}) -> DecentralizedDataParallel<Module>;
template <detail::BareModule Bare, class... Rest>
DecentralizedDataParallel(Bare&&, Rest&&...) -> DecentralizedDataParallel<std::remove_cvref_t<Bare>>;

}  // namespace shoal
