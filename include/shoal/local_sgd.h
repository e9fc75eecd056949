#pragma once
// LocalUpdates: ranks train on their own and exchange their parameters once in many steps: local SGD, SlowMo, DiLoCo.
// For links that are too slow to carry the gradients of every step.

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "shoal/detail/optimizer_state.h"
#include "shoal/group.h"

namespace shoal {

class CheckpointSource;

// What an exchange makes of theta, the values that all ranks share, given the ranks' own values x_i: with the mean x of
// the x_i and the outer gradient D = theta - x,

// theta <- x. Stich, "Local SGD Converges Fast and Communicates Little" (ICLR 2019).
struct Averaging {};

// u <- slow_momentum u + D / g; theta <- theta - slow_lr g u, where g is the inner optimizer's learning rate of the
// parameter when it is sent; where that is 0, u <- slow_momentum u and theta <- theta - slow_lr D. Wang et al.,
// "SlowMo: Improving Communication-Efficient Distributed SGD with Slow Momentum" (ICLR 2020). Rates must be equal on
// all ranks.
struct SlowMo {
  double slow_lr = 1;          // alpha
  double slow_momentum = 0.5;  // beta; 0 with slow_lr 1: Averaging
};

// u <- momentum u + D; theta <- theta - lr (D + momentum u). Douillard et al., "DiLoCo: Distributed Low-Communication
// Training of Language Models" (2023), with AdamW as inner optimizer.
struct OuterNesterov {
  double lr = 0.7;
  double momentum = 0.9;
};

struct LocalUpdatesOptions {
  // Behaviour.
  int64_t every = 100;  // steps between two exchanges of a parameter (H of DiLoCo, tau of SlowMo)
  std::variant<Averaging, SlowMo, OuterNesterov> outer = Averaging{};
  // Douillard et al., "Streaming DiLoCo with overlapping communication" (2025): fragment p of P is sent after the steps
  // (p + 1) every / P (rounded down), and again after each further `every`. At most `every`, and at most as many as
  // there are trainable parameters. Parameters are whole in one, and spread evenly by size.
  int fragments = 1;
  int64_t delay = 0;              // what is sent after one step is applied so many later; less than `every`
  std::optional<double> alpha{};  // x_i <- alpha x_i + (1 - alpha) theta, in [0, 1); none: 0, with a delay 0.5
  int64_t warmup_steps = 0;      // at first: the mean of all gradients in every step, as DistributedDataParallel has it
  bool reset_optimizer = false;  // an exchange drops the inner optimizer's state of its parameters (in SlowMo: "reset")
  bool average_buffers = false;  // floating-point buffers become their mean after every `every` steps
  std::vector<std::string> ignored{};  // names of parameters and buffers that shoal leaves alone

  // Performance.
  // float32 or bfloat16, in which D travels; none: the parameters' own, float32 for those of 16 bits.
  std::optional<at::ScalarType> reduce_dtype{};

  // Throws UsageError that lists all faults.
  void validate() const;
};

// Scope in which parameters hold the mean over ranks, and with average_buffers the buffers too; afterwards they are
// this rank's own again. No step may be taken meanwhile.
class MeanParameters {
 public:
  using Saved = std::vector<std::pair<at::Tensor, at::Tensor>>;  // a tensor of the module and its own values

  // ended: called when the scope has ended.
  explicit MeanParameters(Saved saved, std::function<void()> ended = {})
      : saved_(std::move(saved)), ended_(std::move(ended)) {}
  MeanParameters(MeanParameters&& other) noexcept
      : saved_(std::exchange(other.saved_, {})), ended_(std::exchange(other.ended_, {})) {}
  MeanParameters& operator=(MeanParameters&&) = delete;
  ~MeanParameters();

 private:
  Saved saved_;
  std::function<void()> ended_;
};

//   torch::optim::AdamW optimizer(model->parameters(), 4e-4);
//   shoal::LocalUpdates local(model, optimizer, world.group(), {.every = 500, .outer = shoal::OuterNesterov{}});
//   for (...) {
//     loss(model->forward(x), y).backward();
//     local.step();
//     local.zero_grad();
//   }
//   const auto mean = local.mean_parameters();  // what to evaluate and to save
//
// step() is optimizer.step() and, when one is due, an exchange: one all-reduce of a fragment's parameters per dtype and
// device. With a delay it travels while training goes on. Gradients stay this rank's own: clip and unscale them as in
// one process. Between exchanges nothing is communicated (in the warm-up: in backward), and ranks have different
// parameters. theta is the same on all ranks to the last bit.
//
// Parameters may be loaded or written between steps, on all ranks alike or each with values of its own: training goes on
// from there, theta is what the ranks then have, or the mean of it, and what was on its way is dropped for them; u and
// the optimizer's state stay. All ranks must have changed the same parameters (DisagreeError from step(), which is then
// collective). After load_state_dict() parameters are taken as belonging to that state.
//
// Every rank must call step() as often as the others. One that has no batch, or whose gradients are of no use (inf, an
// exception in forward or backward), calls step(false); one that calls it less often makes the others wait, up to the
// world's deadline. In the warm-up that holds for backward, which is collective there: when it fails on one rank, the
// others get StepAbandoned, and the step counts on no rank; zero_grad(), and the next one.
//
// Memory beside the module and the optimizer: theta and u, each as large as the trainable parameters (at least
// float32); Averaging has no u, and theta only with a reduce_dtype. In an exchange also the fragment, once.
//
// The optimizer is the caller's, holds every trainable parameter of the module, and outlives this object. Shares
// ownership of the module. Not thread-safe. The destructor waits for what is on its way: destroy it after the same step
// on all ranks.
//
// Constructor: collective; gives everybody rank 0's values. UsageError for wrong options, more fragments than
// parameters, parameters that are complex or that the optimizer does not have, and others that it has;
// DisagreeError when ranks have different models or options.
class LocalUpdates {
 public:
  LocalUpdates(std::shared_ptr<torch::nn::Module> module, torch::optim::Optimizer& optimizer, const Group& group,
               const LocalUpdatesOptions& options);
  template <class Module>
  LocalUpdates(const torch::nn::ModuleHolder<Module>& module, torch::optim::Optimizer& optimizer, const Group& group,
               const LocalUpdatesOptions& options)
      : LocalUpdates(std::static_pointer_cast<torch::nn::Module>(module.ptr()), optimizer, group, options) {}
  ~LocalUpdates();
  LocalUpdates(const LocalUpdates&) = delete;
  LocalUpdates& operator=(const LocalUpdates&) = delete;

  // `update` false: this rank's optimizer does nothing in this step. Collective when an exchange is sent or applied.
  // What the optimizer throws leaves the step uncounted. UsageError for a parameter that has come to require a
  // gradient.
  void step(bool update = true);
  // The optimizer's; in the warm-up it also ends a backward that has failed here.
  void zero_grad();

  // Collective. An exchange that is on its way stays so.
  [[nodiscard]] MeanParameters mean_parameters();

  int64_t steps() const;  // taken so far, those of the warm-up included
  // Names of the parameters in each.
  std::vector<std::vector<std::string>> fragments() const;

  // What this object keeps, a copy by parameter names; TrainingState has it in checkpoints, with all else: "step",
  // "anchor" (theta), "momentum_buffer" (u), and of what is on its way "in_flight" (the mean of D, or of x where there
  // is no theta) and for SlowMo "rate". It is the same on all ranks, and any number of ranks may go on from it. Waits
  // for what is on its way.
  OptimizerState state_dict();
  // Not collective: to be called with the same state on all ranks. The parameters, which differ between exchanges, and
  // the optimizer's state are the caller's, to be loaded after the construction. UsageError that names the parameter
  // for entries that are missing, extra, of another shape or of other options; nothing has changed then.
  void load_state_dict(const OptimizerState& state);

  struct State;

 private:
  friend std::shared_ptr<CheckpointSource> checkpoint_source(LocalUpdates& updates);
  std::unique_ptr<State> state_;
};

// For TrainingState.
std::shared_ptr<CheckpointSource> checkpoint_source(LocalUpdates& updates);

}  // namespace shoal
