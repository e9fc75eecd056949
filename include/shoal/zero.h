#pragma once
// ZeRO-1 and ZeRO-2: OSS and ShardedDataParallel.

#include <torch/optim/optimizer.h>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "shoal/detail/data_parallel.h"
#include "shoal/detail/local_optimizer.h"
#include "shoal/detail/optimizer_state.h"
#include "shoal/group.h"
#include "shoal/hooks.h"
#include "shoal/precision.h"

namespace shoal {

// OSS: optimizer state sharded over ranks by whole parameters (ZeRO-1; Rajbhandari et al., "ZeRO: Memory Optimizations
// Toward Training Trillion Parameter Models", SC 2020; after fairscale's OSS).

struct OSSOptions {
  // Where ranks do not share memory: elements of parameters in one broadcast; -1: a rank's whole share.
  int64_t broadcast_buffer_size = -1;
  // Parameters travel in float16, and all ranks (the owner, too) hold values rounded to it.
  bool broadcast_fp16 = false;

  // Throws UsageError that lists all faults.
  void validate() const;
};

class CheckpointSource;
class DataParallelCore;

// Elements that each rank owns.
struct ShareSizes {
  std::vector<int64_t> trainable;  // by rank of the group; no two differ by more than `largest`
  std::vector<int64_t> frozen;     // of parameters that were trainable before
  int64_t largest = 0;             // the largest trainable parameter
};

// What OSS does, whatever the optimizer. Use OSS.
class OSSCore : public torch::optim::Optimizer {
 public:
  using ParamGroups = std::vector<torch::optim::OptimizerParamGroup>;
  using Factory = std::function<std::unique_ptr<torch::optim::Optimizer>(const ParamGroups& groups)>;

  OSSCore(const ParamGroups& groups, std::unique_ptr<torch::optim::OptimizerOptions> defaults, Factory make,
          const Group& group, const OSSOptions& options);
  ~OSSCore() override;

  // Updates this rank's share with the gradients that lie in grad(), then every rank gets every share. Gradients of
  // other ranks' parameters are not read. A parameter without gradient on its owner stays as it is. Collective; returns
  // what the closure returns. UsageError where a wrapper's no_sync has left gradients that are this rank's alone.
  at::Tensor step(LossClosure closure = nullptr) override;

  // Scales all gradients so that their norm over all ranks' shares is at most `max_norm`; returns the norm before, 0
  // without any gradient. norm_type: what torch's clip_grad_norm_ takes, also infinity (the largest element),
  // fractions, negative numbers and 0 (how many parameters have a gradient). The same on every rank as that function of
  // the whole model's averaged gradients, also for inf and NaN among them. UsageError for a norm_type of NaN.
  // Collective.
  double clip_grad_norm(double max_norm, double norm_type = 2);

  // After requires_grad of parameters has changed: those that have become trainable join, with rank 0's values.
  // Trainable elements are balanced again: if shares differ by more than the largest trainable parameter, some move to
  // another rank, with their state (as long as that is of a known kind, see register_state; else owners stay). Frozen
  // ones keep their owner and their state. UsageError for param groups that have come through torch::optim::Optimizer&.
  // Collective.
  void refresh_trainable();

  // Further parameters, rank 0's values of which count; the group's options become what the local optimizer makes of
  // them. UsageError for a parameter that is there already, and for options that the local optimizer refuses;
  // DisagreeError for other groups on other ranks; nothing has changed then, on any rank. Collective. What comes
  // through torch::optim::Optimizer& instead, whose add_param_group is not virtual, is refused by the next step().
  void add_param_group(const torch::optim::OptimizerParamGroup& group);
  // UsageError: take add_param_group.
  [[noreturn]] void add_parameters(const std::vector<at::Tensor>& parameters);

  // Unscales this rank's gradients and looks for inf and NaN; if no rank has any, clips them to `max_norm` (0: does
  // not) and steps. Updates the scaler. Returns whether it stepped. Collective.
  bool step(GradScaler& scaler, double max_norm = 0);

  // The whole optimizer's state by name: on rank `recipient` of the group, elsewhere empty; none: on every rank. Moves
  // one parameter at a time. Collective.
  OptimizerState state_dict(const torch::nn::Module& module, std::optional<int> recipient = std::nullopt) const;
  // Every rank gives the whole state, whatever strategy and number of ranks it comes from. See load_optimizer_state.
  void load_state_dict(const torch::nn::Module& module, const OptimizerState& state);
  // For torch::save and torch::load. UsageError: a rank has no more than its own share; take shoal::save and
  // shoal::load (shoal/checkpoint.h), or state_dict() and load_state_dict().
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  // Who owns what: the parameters that are trainable now and were when shares were made, in the constructor or
  // refresh_trainable(). Not collective, and the same on all ranks.
  std::vector<std::vector<at::Tensor>> partition() const;    // by rank of the group
  int param_to_rank(const at::Tensor& parameter) const;      // rank of the group; UsageError if it is not here
  size_t param_to_index(const at::Tensor& parameter) const;  // place among all parameters of all param groups
  std::vector<at::Tensor> local_params() const;              // this rank's share
  ShareSizes share_sizes() const;
  const Group& group() const;

  // This rank's share of the optimizer, with its state.
  const torch::optim::Optimizer& local_optimizer() const;

  struct State;

 private:
  // Makes shares of these groups, which are as the caller gave them from number `given` on. What it refuses changes
  // nothing. Collective.
  void rebuild(ParamGroups groups, size_t given);

  friend std::shared_ptr<CheckpointSource> checkpoint_source(DataParallelCore& parallel, OSSCore& optimizer);
  friend class ShardedDataParallelCore;
  void adopt_changes();

  std::unique_ptr<State> state_;
};

// For TrainingState. parallel: DistributedDataParallel or ShardedDataParallel.
std::shared_ptr<CheckpointSource> checkpoint_source(DataParallelCore& parallel, OSSCore& optimizer);

// Wraps any libtorch optimizer that updates parameters one by one or element by element: SGD, Adam, AdamW, RMSprop,
// Adagrad, shoal's own. Schedulers work on it, param groups keep their own options, and options may change between
// steps.
//
//   shoal::OSS<torch::optim::AdamW> optimizer(model->parameters(), torch::optim::AdamWOptions(1e-3), world.group());
//
// Each parameter is owned by one rank, which alone keeps its state and updates it. Owners are chosen in the order in
// which backward delivers gradients (last parameter first), always the rank with the least so far, so that shares
// differ by at most the largest parameter and gradients for all ranks become ready all along.
//
// Where the group's ranks share a host, the trainable parameters move to memory that they share: there is one copy of
// them, and a step moves nothing. They become private again with the destructor.
//
// Parameters may be loaded, replaced or written at any time, as in one process (torch::load, Module::load, set_data,
// operators that write, also through data()): a rank sees what it did itself, and the next step() makes it everybody's.
// All ranks do the same; DisagreeError from step() where their values differ. So too after Module::to(dtype) and when
// a parameter of the param groups is unfrozen: shares are made anew. What is written past the operators (data_ptr) is
// not noticed: write it on the owner.
//
// Constructor: collective. The ranks' parameters must agree in number, shape, dtype and options (DisagreeError);
// rank 0's values count. UsageError for a parameter in two param groups, for what the local optimizer refuses, for
// L-BFGS and for options out of range.
template <class Local>
class OSS : public OSSCore {
 public:
  // Local: the optimizer that a rank runs on its share; defaults: its options.
  template <class Defaults>
  OSS(std::vector<at::Tensor> parameters, const Defaults& defaults, const Group& group, const OSSOptions& options = {})
      : OSS(ParamGroups{torch::optim::OptimizerParamGroup(std::move(parameters))}, defaults, group, options) {}
  template <class Defaults>
  OSS(const ParamGroups& groups, const Defaults& defaults, const Group& group, const OSSOptions& options = {})
      : OSSCore(groups, detail::default_options<Local>(defaults), detail::local_optimizer_maker<Local>(defaults), group,
                options) {}
};

// ShardedDataParallel: each gradient goes only to the rank that owns its parameter (ZeRO-2; Rajbhandari et al., SC
// 2020; after fairscale's ShardedDataParallel).

struct Gradient;

struct ShardedDataParallelOptions {
  // Behaviour.
  bool broadcast_buffers = true;       // rank 0's buffers reach all ranks before each synchronising forward
  bool sync_models_at_startup = true;  // rank 0's parameters and buffers reach all ranks in the constructor; without it
                                       // buffers and frozen parameters stay each rank's own (trainable ones have
                                       // rank 0's values since OSS was made)
  bool auto_refresh_trainable = true;  // a change of requires_grad, dtype or device is adopted by the next forward,
                                       // which refuses it otherwise
  bool find_unused_parameters = false;  // accept parameters that no rank uses in a step; costs a walk of the graph
  bool grad_reduce_in_fp32 = false;     // gradients of 16-bit parameters accumulate, and are added up, in float32, in
                                        // which grad() is under no_sync(); then it is rounded to the parameter's dtype
  std::vector<std::string> ignored{};   // names of parameters and buffers that shoal leaves alone
  Precision precision{};                // forward computes as `compute` says; converting and scaling are the caller's
  std::shared_ptr<CommunicationHook> communication_hook{};  // sums up gradients on their owners instead of a reduce
  std::shared_ptr<BufferHook> buffer_hook{};                // makes buffers equal instead of rank 0's broadcast
  BufferHookLocation buffer_hook_location = BufferHookLocation::pre_forward;
  bool log_sizes = true;  // rank 0 says on standard error how large the model, the shares and the buckets are

  // Performance.
  int64_t reduce_buffer_size = 1 << 23;  // elements in a bucket; smaller where the model would give fewer than four
                                         // buckets per rank, so that they leave while backward runs
  bool reduce_fp16 = false;              // gradients travel, and are added up on the way, in float16 (CompressHook);
                                         // grad() and micro-batches keep the parameter's dtype. Not with another hook

  // Throws UsageError that lists all faults.
  void validate() const;
};

class ShardedDataParallelCore : public DataParallelCore {
 public:
  ShardedDataParallelCore(std::shared_ptr<torch::nn::Module> module, std::vector<OSSCore*> optimizers,
                          const Group& group, const ShardedDataParallelOptions& options);
  // After requires_grad, dtype or device of parameters has changed: the optimizers' refresh_trainable(), then buckets
  // of what they share. Forward calls it by itself unless auto_refresh_trainable is off; then a forward after such a
  // change is refused until it has been called (UsageError names the parameter). Collective.
  void refresh_trainable();

  // Sums up what lies in grad() and has not been summed up yet, without a backward: what backwards under no_sync have
  // left, gradients that were set by hand. A rank without any contributes nothing; sums of earlier steps stay and are
  // added to. Counts as a step, within no_sync, too. Collective; UsageError within a backward.
  void reduce();

 protected:
  void prepare() override;

 private:
  struct Sharding;
  void share();
  void freeze();
  std::vector<int> share_gradients(std::vector<Gradient>& gradients) const;
  std::vector<int64_t> times_shared() const;
  bool are_shares_balanced() const;
  [[noreturn]] void refuse_changes() const;
  std::shared_ptr<Sharding> sharding_;
};

// Like DistributedDataParallel, with the sums of gradients on their owners alone: after backward, grad() is the mean
// over ranks of the parameters that this rank owns. For the others it is a tensor without memory: reading it is a
// UsageError that names the call to use, and zero_grad() works as ever.
//
//   shoal::OSS<torch::optim::AdamW> optimizer(model->parameters(), torch::optim::AdamWOptions(1e-3), world.group());
//   shoal::ShardedDataParallel parallel(model, optimizer, world.group());
//   ...
//   cross_entropy(parallel.forward(x), y).backward();
//   optimizer.step();
//   optimizer.zero_grad();
//
// The optimizers must outlive the wrapper; each trainable parameter belongs to exactly one of them (UsageError names
// those that do not). Without zero_grad between synchronised backwards, gradients add up on their owners. Call forward
// of the wrapper, not of the module. All parameters are on devices of one type (UsageError). A step reduces every
// gradient to its owner, about ranks - 1 / ranks of what DDP sends, and takes one more small all-reduce, in which ranks
// tell which gradients they used.
template <class Module>
class ShardedDataParallel : public DataParallelWrapper<Module, ShardedDataParallelCore> {
  using Base = DataParallelWrapper<Module, ShardedDataParallelCore>;

 public:
  using Options = ShardedDataParallelOptions;

  ShardedDataParallel(std::shared_ptr<Module> module, std::vector<OSSCore*> optimizers, const Group& group,
                      const Options& options = {})
      : Base(std::move(module), std::move(optimizers), group, options) {}
  ShardedDataParallel(std::shared_ptr<Module> module, OSSCore& optimizer, const Group& group,
                      const Options& options = {})
      : ShardedDataParallel(std::move(module), std::vector<OSSCore*>{&optimizer}, group, options) {}
  ShardedDataParallel(const torch::nn::ModuleHolder<Module>& module, OSSCore& optimizer, const Group& group,
                      const Options& options = {})
      : ShardedDataParallel(module.ptr(), optimizer, group, options) {}
  ShardedDataParallel(const torch::nn::ModuleHolder<Module>& module, std::vector<OSSCore*> optimizers,
                      const Group& group, const Options& options = {})
      : ShardedDataParallel(module.ptr(), std::move(optimizers), group, options) {}
  template <detail::BareModule Bare, class... Rest>
  explicit ShardedDataParallel(Bare&& module, Rest&&... rest)
      : ShardedDataParallel(detail::refuse_bare_module<Bare>(module), std::forward<Rest>(rest)...) {}
};

template <class Module>
ShardedDataParallel(const torch::nn::ModuleHolder<Module>&, OSSCore&, const Group&,
                    const ShardedDataParallelOptions& = {}) -> ShardedDataParallel<Module>;
template <class Module>
ShardedDataParallel(const torch::nn::ModuleHolder<Module>&, std::vector<OSSCore*>, const Group&,
                    const ShardedDataParallelOptions& = {}) -> ShardedDataParallel<Module>;
template <detail::BareModule Bare, class... Rest>
ShardedDataParallel(Bare&&, Rest&&...) -> ShardedDataParallel<std::remove_cvref_t<Bare>>;

}  // namespace shoal
