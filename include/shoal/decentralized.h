#pragma once
// DecentralizedDataParallel: decentralised training. Every rank trains its own parameters and averages them with a few
// neighbours per step; nothing is synchronised over all ranks. Source: Lian et al., "Can Decentralized Algorithms
// Outperform Centralized Algorithms?" (NeurIPS 2017); the overlap of the exchange with the next step is from decent-dp
// (Wang et al., ICLR 2025).

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
#include "shoal/group.h"
#include "shoal/optimizer_recipe.h"
#include "shoal/optimizer_state.h"
#include "shoal/precision.h"
#include "shoal/topology.h"

namespace shoal {

struct NamedParameter {
  std::string name;
  at::Tensor parameter;
};

using ScheduleFactory = std::function<std::unique_ptr<torch::optim::LRScheduler>(torch::optim::Optimizer&)>;

// Argument of pre_average_hook: a bucket before the average x <- own_weight * x + received.
struct PreAverage {
  torch::optim::Optimizer& optimizer;             // the bucket's
  const std::vector<NamedParameter>& parameters;  // x, with their gradients
  const std::vector<at::Tensor>& received;        // sums of W_ij y_j in the parameters' shapes; may be modified
  double own_weight;                              // W_ii plus the weights of neighbours that are left out
  const MixingRound& round;
  int rank;  // rank of this process in the round
};

// Compression of the exchange: ranks send compressed differences to the copy of their parameters that their neighbours
// hold; what is not sent stays in the difference. x <- x + rate * sum over j of W_ij (h_j - h_i), where h_i is the copy
// of rank i's parameters, which is equal on all ranks that receive from it. Source: CHOCO-SGD (Koloskova, Stich, Jaggi,
// "Decentralized Stochastic Optimization and Gossip Algorithms with Compressed Communication", ICML 2019). Extra
// memory: a copy of the parameters per round of the topology, and one per neighbour and round.
struct CompressedExchange {
  std::optional<double> top_k{};  // fraction of a bucket's elements that is sent, largest differences first, in
                                  // float32; none: all elements, as 8-bit integers with a scale per 256
  std::optional<double> rate{};   // in (0, 1]; none: 1 for integers, rate_of_top_k otherwise. Small fractions need a
                                  // smaller rate: with too large a rate the ranks diverge
  static constexpr double rate_of_top_k = 0.1;
};

enum class ClipScope { all_gradients, bucket };

struct DecentralizedDataParallelOptions {
  // Behaviour.
  std::optional<Topology> topology{};         // topology of the group's size; none: one-peer-exp
  ScheduleFactory schedule{};                 // one step per update; none: constant rates
  double clip_grad = 0;                       // maximum norm of this rank's gradients; 0: no clipping
  ClipScope clip = ClipScope::all_gradients;  // norm of all gradients (updates then wait for the end of backward) or of
                                              // each bucket, as in decent-dp
  // Loss scaler. A rank that finds inf or NaN averages but does not update. The other ranks learn of it in the next
  // steps and adopt the smaller scale.
  std::optional<GradScalerOptions> scaler{};
  Precision precision{};         // only `compute` is applied, as autocast in forward; convert the module yourself
  bool average_buffers = false;  // global_avg() also averages floating-point buffers
  std::function<void(const PreAverage&)> pre_average_hook{};  // called from the second step on
  std::vector<std::string> ignored{};    // names of parameters and buffers that shoal does not touch
  double neighbour_timeout_seconds = 5;  // a neighbour that is later is left out of the step; infinity: wait for it

  // Performance.
  double bucket_cap_mb = 25;         // MiB of parameters that are updated and published together
  bool param_as_bucket_view = true;  // parameters lie in their bucket: the constructor gives them storages
                                     // of their own, whose memory is the bucket's from the first step
                                     // on (data() stays valid, addresses do not); off: they keep theirs
  std::optional<at::ScalarType> exchange_dtype{};  // dtype to which values are rounded before they are sent; a rank's
                                                   // own values are not rounded
  std::optional<CompressedExchange> compressed_exchange{};  // replaces the plain exchange; for doubly stochastic
                                                            // topologies of at most 16 rounds, without a
                                                            // pre_average_hook

  // Throws UsageError that lists all faults.
  void validate(int ranks) const;
};

// Counts of exchanges on this rank. An exchange is one bucket from one neighbour.
struct ExchangeStatistics {
  int64_t exchanged = 0;      // values of the expected step
  int64_t newer = 0;          // values of a later step: the neighbour was ahead
  int64_t older = 0;          // the last values of a late neighbour
  int64_t skipped = 0;        // timed out: this rank's own values were used instead
  std::vector<int> removed;   // ranks that have ended or left and are not back; the topology was rebuilt without them
  std::vector<int> rejoined;  // ranks replaced by a new process; the topology was rebuilt with them
};

class CheckpointSource;

// Type-independent part of DecentralizedDataParallel.
class DecentralizedDataParallelCore {
 public:
  DecentralizedDataParallelCore(std::shared_ptr<torch::nn::Module> module, OptimizerRecipe recipe, const Group& group,
                                const DecentralizedDataParallelOptions& options);
  ~DecentralizedDataParallelCore();
  DecentralizedDataParallelCore(const DecentralizedDataParallelCore&) = delete;
  DecentralizedDataParallelCore& operator=(const DecentralizedDataParallelCore&) = delete;

  // Backward of a loss that is a sum over `weight` samples or tokens, see DecentralizedDataParallel. weight >= 0 and
  // finite.
  void backward(const at::Tensor& loss_sum, double weight);
  // `accumulate` false gives a scope without effect.
  [[nodiscard]] NoSync no_sync(bool accumulate = true);
  // See DataParallelCore.
  std::string open_scope() const;
  // After an exception in forward, backward or a hook on this rank: makes the wrapper ready for the next step. The next
  // forward calls it by itself.
  void abandon_step();
  // Names of the parameters in each bucket.
  std::vector<std::vector<std::string>> buckets() const;
  // Steps finished or abandoned so far.
  [[nodiscard]] int64_t steps() const;
  // Options and statistics of the wrapper on this rank. Call it between steps. Not collective.
  LoggingData logging_data() const;

  // Multiplies a loss by the scaler's factor; without a scaler returns it unchanged.
  at::Tensor scale_loss(const at::Tensor& loss) const;
  // Sets the parameters of all ranks to their mean, bit-equal on all ranks, also before the first step. Training can
  // continue. Call it after ranks have loaded or replaced parameters (torch::load, set_data) later than the first step:
  // forward is a UsageError until then, because neighbours would average old values. Collective over the ranks that
  // have not left or ended, after the same number of steps on each: a rank without a batch calls step_without_update().
  // UsageError on a rank that has left.
  void global_avg();
  // Call after values were loaded into the module's parameters in place (copy_()), which is as torch::load then.
  // Without the call, writes in place count as this rank's own training, and are mixed with what neighbours published
  // before.
  void parameters_loaded();
  // Before values are loaded in place, so that loads which leave all values as they were do not count.
  void before_loading();
  // Consensus distance sqrt(mean over ranks of |x_i - x|^2), where x is the mean of the ranks' parameters x_i.
  // Collective.
  double consensus_distance();
  // A step without a batch: averages and publishes, but does not update, and drops gradients that no_sync() left; the
  // schedule advances. Not collective.
  void step_without_update();
  // Ends the training of this rank; its neighbours continue without it. Later steps and collectives are UsageErrors.
  void leave();

  const ExchangeStatistics& statistics() const;
  const Topology& topology() const;
  // Group of the ranks that have not been removed, in rank order. Collective over them if ranks were removed since the
  // last call.
  const Group& remaining();
  // Optimizers, one per bucket, from the first step on. Owned by the wrapper.
  std::vector<torch::optim::Optimizer*> optimizers() const;
  const GradScaler* scaler() const;
  // UsageError if some gradients of the last backward, which has used all of them, were zeroed or dropped since, but
  // not others. Call it before zero_grad(), after which the next backward cannot see that any more.
  void check_gradients() const;
  // Norm of this rank's gradients in the last step before clipping, with clip_grad.
  double last_norm() const;

  // Optimizer state of this rank by parameter name, a copy; and its inverse. Empty before the first step; state loaded
  // before then is applied at the first step. Not collective.
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
  // Makes each step use the options of `whole`, an optimizer of all parameters that is never stepped: the program
  // changes them there. The option `schedule` alone sets the rates, which `whole` shows after each step. The buckets'
  // optimizers must have as many param groups. It must outlive the last step.
  void take_options_from(torch::optim::Optimizer& whole);

 private:
  friend std::shared_ptr<CheckpointSource> checkpoint_source(DecentralizedDataParallelCore& parallel);
  std::unique_ptr<State> state_;
};

// For TrainingState. A checkpoint has every rank's parameters and optimizer state, and the parameters' mean, which
// other strategies load. Before the first step, saves and loads make optimizers and schedules for their options.
std::shared_ptr<CheckpointSource> checkpoint_source(DecentralizedDataParallelCore& parallel);

// Wrapper for decentralised training.
//
//   shoal::DecentralizedDataParallel parallel(
//       model, shoal::optimizer_recipe<shoal::FusedAdamW>(torch::optim::AdamWOptions(1e-3)), world.group(),
//       {.topology = shoal::make_topology("ring", world.size())});
//   ...
//   cross_entropy(parallel.forward(x), y).backward();  // averages, updates and publishes, bucket by bucket
//
// There is no optimizer to step: backward updates the parameters, each bucket by an optimizer of its own for its part
// of the recipe's groups, which have every trainable parameter (UsageError). Let x be a bucket's parameters on this
// rank i, g its gradient at x, W the weights of the round, and y_j the values that neighbour j published after its last
// step. As soon as the bucket's last gradient is computed, backward does
//   x <- W_ii x + sum over j of W_ij y_j;  x <- optimizer(x, g);  publish x
// and drops the gradient: grad() is a tensor without memory until the next backward. It can be zeroed and dropped.
// Reading it (torch::nn::utils::clip_grad_norm_) is a UsageError that names clip_grad, and so is the next backward if
// gradients of only some parameters were zeroed or dropped (check_gradients() sees that before a zero_grad() of all
// hides it). Tensor hooks of parameters see gradients and may modify them. Values published after step k = 1, 2, ...
// are averaged in step k + 1 with the weights of round k, modulo the topology's number of rounds. The first step
// therefore averages nothing and takes round 0, and an exchange overlaps with a whole step. Parameters that a step does
// not use are averaged and not updated. Ranks may use different modules. A parameter that backward reaches several
// times is updated after the last time (learned in the first step; it is a UsageError if the number grows later).
//
// A neighbour that exceeds neighbour_timeout_seconds is left out of the step, with its weight added to this rank's own.
// This rank does not wait for it again until it has caught up; its last published values are used once. A neighbour
// that has ended is removed, and the topology is rebuilt for the other ranks. Only the constructor, the first step (in
// which ranks agree on the buckets: rank 0's order of gradients, and exchange weights; also the first one after a load
// that is not exact), global_avg() and consensus_distance() are collective; they need all ranks that have not been
// removed.
//
// backward(loss_sum, weight): every rank divides its sum by the mean weight of all ranks in the step, so that the mean
// of the ranks' gradients is sum / total weight. Ranks exchange their weights in the first step, and then with the
// values that they publish. For weights that change, the mean is a running mean (factor 0.1 per step), because no rank
// waits for the exact one. It is exact in the first step, while each rank's weight is constant, and if weights only
// move between ranks over a complete topology. Steps of plain backwards on all ranks leave the mean as it is; if the
// first step is one, the first weighted step divides by the rank's own weight. The gradient is weighted: an optimizer
// that normalises gradients (Adam) cancels the weight.
//
// Gradients computed by torch::autograd::grad are not a step.
//
// Different numbers of batches per rank need no Join. A rank without a batch may call leave(), after which the others
// average among themselves (a mean over ranks with batches); or it calls step_without_update() until all ranks have
// made the same number of steps, on which they agree beforehand (a mean over all ranks).
//
// A rank whose process has died can be replaced by a new process (WorldOptions::rejoin) that constructs the same
// wrapper. The constructor copies a neighbour's parameters, buffers, optimizer state, scaler, step and position in the
// topology, and the others include it from a common step on. They notice it between steps, within 0.2 s plus one step;
// the neighbour's step takes longer by the copy. Learning rates follow the new process's options and schedule. The
// constructor is then not collective. It throws CommError if ranks do not answer within rendezvous_timeout_seconds,
// DisagreeError for another model or topology. At most one such wrapper per group.
//
// Constructor: collective. Broadcasts rank 0's values. Throws UsageError for invalid options, a topology of another
// size and complex parameters; DisagreeError if the ranks hold different models, topologies or exchange options. The
// destructor leaves the training: neighbours continue without this rank. Keep the wrapper as long as backward is to
// update. Not thread-safe.
template <class Module>
class DecentralizedDataParallel : public detail::DataParallelWrapper<Module, DecentralizedDataParallelCore> {
  using Base = detail::DataParallelWrapper<Module, DecentralizedDataParallelCore>;

 public:
  using Options = DecentralizedDataParallelOptions;

  DecentralizedDataParallel(std::shared_ptr<Module> module, OptimizerRecipe recipe, const Group& group,
                            const Options& options = {})
      : Base(std::move(module), std::move(recipe), group, options) {}
  DecentralizedDataParallel(const torch::nn::ModuleHolder<Module>& module, OptimizerRecipe recipe, const Group& group,
                            const Options& options = {})
      : Base(module.ptr(), std::move(recipe), group, options) {}

  template <detail::BareModule Bare, class... Rest>
  explicit DecentralizedDataParallel(Bare&& module, Rest&&... rest)
      : DecentralizedDataParallel(detail::refuse_bare_module<Bare>(module), std::forward<Rest>(rest)...) {}
};

template <class Module>
DecentralizedDataParallel(const torch::nn::ModuleHolder<Module>&, OptimizerRecipe, const Group&,
                          const DecentralizedDataParallelOptions& = {}) -> DecentralizedDataParallel<Module>;
template <detail::BareModule Bare, class... Rest>
DecentralizedDataParallel(Bare&&, Rest&&...) -> DecentralizedDataParallel<std::remove_cvref_t<Bare>>;

}  // namespace shoal
