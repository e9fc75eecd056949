#pragma once
// LocalUpdates: local training with an exchange of parameters every many steps (local SGD, SlowMo, DiLoCo), for links
// that are too slow to reduce gradients in every step.

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

#include "shoal/group.h"
#include "shoal/mean_parameters.h"
#include "shoal/optimizer_state.h"

namespace shoal {

class CheckpointSource;

// Outer optimizers: updates of theta, the parameters that all ranks share, in an exchange. x is the mean over ranks of
// their parameters x_i; D = theta - x is the pseudo-gradient.

// theta <- x. Source: Stich, "Local SGD Converges Fast and Communicates Little" (ICLR 2019).
struct Averaging {};

// u <- slow_momentum u + D / g; theta <- theta - slow_lr g u, where g is the inner optimizer's learning rate of the
// parameter at the time it is sent. If g is 0: u <- slow_momentum u; theta <- theta - slow_lr D. Source: Wang et al.,
// "SlowMo: Improving Communication-Efficient Distributed SGD with Slow Momentum" (ICLR 2020). Learning rates must be
// equal on all ranks (DisagreeError when a part is sent).
struct SlowMo {
  double slow_lr = 1;          // alpha
  double slow_momentum = 0.5;  // beta; 0 with slow_lr 1 equals Averaging
};

// u <- momentum u + D; theta <- theta - lr (D + momentum u). Source: Douillard et al., "DiLoCo: Distributed
// Low-Communication Training of Language Models" (2023), which uses AdamW as inner optimizer.
struct OuterNesterov {
  double lr = 0.7;
  double momentum = 0.9;
};

struct LocalUpdatesOptions {
  // Behaviour.
  int64_t every = 100;  // steps between two exchanges of a parameter (H in DiLoCo, tau in SlowMo)
  std::variant<Averaging, SlowMo, OuterNesterov> outer = Averaging{};
  // Number of parts that are exchanged at different steps: part p of P is sent after (p + 1) every / P steps (rounded
  // down), then again every `every` steps. At most `every` and at most the number of trainable parameters. A parameter
  // is in one part; parts have similar sizes. Source: Douillard et al., "Streaming DiLoCo with overlapping
  // communication" (2025).
  int fragments = 1;
  int64_t delay = 0;              // steps between sending a part and applying the result; less than `every`
  std::optional<double> alpha{};  // x_i <- alpha x_i + (1 - alpha) theta, in [0, 1); none: 0, or 0.5 with a delay
  int64_t warmup_steps = 0;       // initial steps in which gradients are averaged as in DistributedDataParallel
  bool reset_optimizer = false;   // an exchange drops the inner optimizer's state of its parameters ("reset" in SlowMo)
  bool average_buffers =
      false;  // average floating-point buffers after every `every` steps; equal ones stay as they are
  std::vector<std::string> ignored{};  // names of parameters and buffers that shoal does not touch

  // dtype in which D is sent: float32 or bfloat16; none: the parameters' dtype, float32 for 16-bit parameters.
  std::optional<at::ScalarType> reduce_dtype{};

  // Throws UsageError with a list of all invalid options.
  void validate() const;
};

// Local training with periodic exchanges.
//
//   torch::optim::AdamW optimizer(model->parameters(), 4e-4);
//   shoal::LocalUpdates local(model, optimizer, world.group(), {.every = 500, .outer = shoal::OuterNesterov{}});
//   for (...) {
//     loss(model->forward(x), y).backward();
//     local.step();
//     local.zero_grad();
//   }
//   const auto mean = local.mean_parameters();  // what to evaluate, and to give to save_module()
//
// step() runs optimizer.step() and, if one is due, an exchange: one all-reduce of a part of the parameters per dtype
// and device. With a delay, it overlaps with the following steps. Gradients are this rank's own: clip and unscale them
// as in one process. Between exchanges there is no communication (during the warm-up: in backward), and the ranks have
// different parameters. theta is bit-equal on all ranks.
//
// Parameters may be loaded or written between steps. Values that were loaded (torch::load, set_data,
// parameters_loaded()), or that all ranks have written alike, are where training goes on: theta becomes their mean,
// exchanges in flight are dropped for them, and u and the optimizer's state are kept. Other writes in place count as
// local training, as updates do: a clamp of the weights, averages that are swapped in and out for an evaluation. Either
// way all ranks must change the same parameters (DisagreeError from step(), which is then collective). After
// load_state_dict(), parameters are taken to belong to that state.
//
// Every rank must call step() equally often. A rank without a batch, or with unusable gradients (inf, an exception in
// forward or backward), calls step(false). A rank that calls step() less often makes the others wait, up to the world's
// timeout. During the warm-up the same holds for backward, which is collective then: if it fails on one rank, the
// others get StepAbandoned, and the step counts on no rank; call zero_grad() and continue.
//
// Extra memory: theta and u, each as large as the trainable parameters (at least float32). Averaging has no u, and has
// theta only with a reduce_dtype. During an exchange also a copy of the part that is exchanged.
//
// The caller owns the optimizer, which must hold every trainable parameter of the module and outlive this object.
// Shares ownership of the module. Not thread-safe. The destructor waits for exchanges in flight: destroy the object
// after the same step on all ranks.
//
// Constructor: collective. Broadcasts rank 0's values. Throws UsageError for invalid options, more fragments than
// parameters, complex parameters, parameters that the optimizer does not have, and parameters of the optimizer that the
// module does not have; DisagreeError if the ranks have different models or options.
class LocalUpdates {
 public:
  LocalUpdates(std::shared_ptr<torch::nn::Module> module, torch::optim::Optimizer& optimizer, const Group& group,
               const LocalUpdatesOptions& options = {});
  template <class Module>
  LocalUpdates(const torch::nn::ModuleHolder<Module>& module, torch::optim::Optimizer& optimizer, const Group& group,
               const LocalUpdatesOptions& options = {})
      : LocalUpdates(std::static_pointer_cast<torch::nn::Module>(module.ptr()), optimizer, group, options) {}
  ~LocalUpdates();
  LocalUpdates(const LocalUpdates&) = delete;
  LocalUpdates& operator=(const LocalUpdates&) = delete;

  // Takes a step. With `update` false, this rank's optimizer does not update. Collective if an exchange is sent or
  // applied. If the optimizer throws, the step is not counted. Throws UsageError for a parameter that has started to
  // require a gradient.
  void step(bool update = true);
  // Call after values were loaded into the module's parameters in place (copy_()) and differ between ranks, before the
  // next step. Values that are equal on all ranks, and torch::load, need no call.
  void parameters_loaded();
  // Before values are loaded in place, so that loads which leave all values as they were do not count.
  void before_loading();
  // Calls the optimizer's zero_grad(). During the warm-up it also ends a backward that has failed on this rank.
  void zero_grad(bool set_to_none = true);

  // Scope with the mean of the ranks' parameters (and with average_buffers also buffers), to evaluate, and for
  // save_module() and torch::save. Steps and checkpoints in it are UsageErrors; a checkpoint has the mean, too.
  // Exchanges in flight continue. The scope may outlive this object. Collective.
  [[nodiscard]] MeanParameters mean_parameters();

  int64_t steps() const;  // number of steps so far, including the warm-up
  // Names of the parameters in each fragment.
  std::vector<std::vector<std::string>> fragments() const;

  // State of this object by parameter name, a copy: "step", "anchor" (theta), "momentum_buffer" (u), and for exchanges
  // in flight "in_flight" (the mean of D, or of x without theta) and for SlowMo "rate". Equal on all ranks, and valid
  // for any number of ranks. Waits for exchanges in flight. A TrainingState stores it in checkpoints together with
  // parameters and optimizer state.
  OptimizerState state_dict();
  // Restores the state; call it with the same state on all ranks. The caller loads the parameters, which differ between
  // ranks, and the optimizer's state, after construction. Throws UsageError, which names the parameter, for entries
  // that are missing, extra, of another shape or of other options; nothing changes then. Not collective.
  void load_state_dict(const OptimizerState& state);

  struct State;

 private:
  friend std::shared_ptr<CheckpointSource> checkpoint_source(LocalUpdates& updates);
  friend State& state_of(LocalUpdates& updates);
  std::shared_ptr<State> state_;
};

// For TrainingState.
std::shared_ptr<CheckpointSource> checkpoint_source(LocalUpdates& updates);

}  // namespace shoal
