#pragma once
// FullyShardedDataParallel: parameters, gradients and optimizer state are divided over the ranks; a unit's parameters
// are whole only while they are used (ZeRO-3; Rajbhandari et al., SC 2020; Zhao et al., "PyTorch FSDP", VLDB 2023).

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "shoal/detail/data_parallel.h"
#include "shoal/detail/inputs.h"
#include "shoal/detail/local_optimizer.h"
#include "shoal/detail/sharded_optimizer.h"
#include "shoal/hooks.h"
#include "shoal/optim.h"
#include "shoal/wrap_policy.h"

namespace shoal {

enum class ShardingStrategy {
  full_shard,            // parameters are whole only while they are used
  shard_grad_op,         // and from forward to the end of backward
  no_shard,              // always, on every rank: what DistributedDataParallel does
  hybrid_shard,          // full_shard among the ranks of a host, equal shards on all hosts
  hybrid_shard_grad_op,  // shard_grad_op among the ranks of a host
};

struct FullyShardedDataParallelOptions {
  // Behaviour.
  ShardingStrategy sharding_strategy = ShardingStrategy::full_shard;
  std::optional<at::Device> device{};  // a module on the CPU is moved there; without: it stays where it is. No
                                       // index: the current one of its kind, with a warning
  std::optional<WrapPolicy> auto_wrap_policy{};  // without, the module is one unit
  std::optional<int> shard_size{};              // hybrid: ranks, in a row, that divide a model among them; without: the
                                                // ranks of each host, wherever they are in the group
  bool sync_module_states = true;               // start with rank 0's parameters and buffers; off: each rank's own
                                                // values count for the ranges that it owns, and ranks that own the same
                                                // (hybrid, no_shard) must have the same
  bool whole_parameters = false;                // every parameter belongs to one rank, for optimizers that are not
                                                // element-wise (optim/element_wise.h); off: ranks own equal ranges
  Precision precision{};                        // its parameters' dtype is the module's, its scaler the optimizer's
  std::optional<at::ScalarType> param_dtype{};  // floating-point parameters get this dtype, as do forward's inputs;
                                                // each rank keeps a float32 copy of its own ranges
  std::optional<at::ScalarType> reduce_dtype{};   // gradients are added up in it; without: in the parameters' dtype
  std::optional<at::ScalarType> buffer_dtype{};   // floating-point buffers get it; full_state_dict gives them back in
                                                  // their own
  bool cpu_offload = false;                       // shards, sums of gradients and updates on the CPU; a model there has
                                                  // them there in any case, others are not supported yet
  std::vector<std::string> ignored_modules{};     // names of sub-modules that stay as they are on every rank; '' is the
                                                  // module itself, with a warning
  std::vector<std::string> ignored_parameters{};  // names of parameters and buffers that do
  std::shared_ptr<CommunicationHook> communication_hook{};  // sums up gradients instead of a reduce-scatter; with
                                                            // no_shard and the hybrid strategies instead of the
                                                            // all-reduce among those that have equal shards

  // Performance. Where ranks share memory parameters exist once per host, and these have no effect.
  size_t unit_limit = 3;      // units whose parameters are in memory; an operator that takes more at once fails
  size_t prefetch_units = 1;  // of these, how many are fetched ahead of use; 0: none
  std::optional<int64_t> byte_limit{};  // bytes of these parameters, each unit fetched ahead counted as the largest;
                                        // the memory that they lie in is used again, and up to a quarter larger

  // Debugging.
  bool check_unit_order = false;  // where units are gathered: ranks that used them in different orders get a
                                  // DisagreeError from the next forward; a change of order is warned of once

  // Throws UsageError that lists all faults.
  void validate() const;
};

// What summon_full_params does. All ranks give the same.
struct SummonFullParamsOptions {
  bool writeback = true;    // what each rank has written to the parameters counts, for the ranges that it owns; write
                            // the same on all ranks. Otherwise changes are lost
  bool rank0_only = false;  // parameters are gathered on rank 0 of the group alone; elsewhere they are as outside.
                            // Not with writeback
  bool offload_to_cpu = false;  // a model on the CPU is there in any case; refused for others
  bool with_grads = false;  // grad() is the whole sum of the gradients in the parameter's dtype, where there is one;
                            // with writeback, what is written to it counts as well
  bool recurse = true;      // also the parameters of units that auto_wrap_policy has made, and of sub-modules that
                            // have wrappers of their own; off: those of the module's own unit alone
};

// Called with a name and a whole tensor that the callee may keep.
using StateVisitor = std::function<void(const std::string& name, const at::Tensor& value)>;

class CheckpointSource;
class FullParameters;
class FullyShardedOptimizerCore;
class ShardGossipOptimizerCore;

// What FullyShardedDataParallel does, whatever the module's type.
class FullyShardedCore : public DataParallelCore {
 public:
  struct Shards;
  FullyShardedCore(std::shared_ptr<torch::nn::Module> module, const Group& group,
                   const FullyShardedDataParallelOptions& options);
  ~FullyShardedCore() override;

  // For micro-batches but the last: scope in which a backward adds gradients up, but across hosts only those of the
  // first backward outside do, together with all before. So gradients take a rank's part in memory, where no_sync takes
  // the whole, and cross between hosts once a step, where they would at every micro-batch. As FSDP2's
  // set_requires_all_reduce(false). What counts is the scope at the time of backward; be in it for forward as well.
  // Weights of backward(loss_sum, weight) are added up as under no_sync. Where all ranks divide the model among them
  // (not the hybrid strategies) nothing is left to defer, and every backward adds up completely. An optimizer's step in
  // between is a UsageError, and so is the scope inside a Join.
  //   const auto scope = parallel.defer_all_reduce(micro + 1 < micros);
  [[nodiscard]] NoSync defer_all_reduce(bool defer = true);

  // Scales the sums of gradients so that their norm over all ranks' shards is at most `max_norm`; returns the norm
  // before. norm_type: positive, or infinity. Between backward and step. Where the optimizer has a scaler, of gradients
  // without the loss's scale: they are unscaled first, and step() does not do it again. Collective.
  double clip_grad_norm_(double max_norm, double norm_type = 2);

  // Scope in which parameters may be read and written as if they were not sharded. UsageError for rank0_only with
  // writeback, for offload_to_cpu unless the model is on the CPU, and while another one holds the parameters;
  // DisagreeError when options differ between ranks.
  //   const auto whole = parallel.summon_full_params({.writeback = false, .with_grads = true});
  [[nodiscard]] FullParameters summon_full_params(const SummonFullParamsOptions& options);
  [[nodiscard]] FullParameters summon_full_params(bool writeback = true);

  // Parameters by name, whole and in the dtype that the optimizer updates, and buffers: copies, on rank `recipient` of
  // the group, elsewhere empty; none: on every rank. Collective.
  std::map<std::string, at::Tensor> full_state_dict(std::optional<int> recipient = std::nullopt) const;

  // The same one by one, in an order that is the same on all ranks, so that no rank ever holds more than one of them
  // beyond its shards, unless `visit` keeps it. For a model that is larger than a rank's memory. A tensor with several
  // names is visited under each. What `visit` throws comes out after the other ranks have done their part. Collective.
  void visit_full_state(std::optional<int> recipient, const StateVisitor& visit) const;

  // Gives the module its parameters whole, in memory of its own, for what comes after this wrapper: another wrapper,
  // torch::save, evaluation. With param_dtype they are in float32 again, as the optimizer has updated them; buffers have
  // their own dtypes. Gradients are dropped. Afterwards everything else of this wrapper and its optimizer is a UsageError.
  // So is this while summon_full_params holds the parameters. Collective.
  void unwrap();

  // Names of the parameters in each unit, frozen ones included, in the order of first use that is expected.
  std::vector<std::vector<std::string>> units() const;
  // Whether parameters lie once per host, in shared memory.
  bool shared() const;
  // This rank's pieces of the trainable parameters, as the optimizer updates them, and of the gradients' sums.
  std::vector<at::Tensor> own_parameters() const;
  std::vector<at::Tensor> own_gradients() const;
  // For FullParameters; without the wrappers of sub-modules.
  void check_hold(const SummonFullParamsOptions& options) const;
  void hold(const SummonFullParamsOptions& options);
  void release();
  std::vector<FullyShardedCore*> wrappers_within();

 protected:
  TensorCast input_cast() const;
  void adopt_changes(bool training) override;
  void begin_pass(bool training) override;
  void end_pass(bool training) override;

 private:
  friend class FullyShardedOptimizerCore;
  friend std::shared_ptr<CheckpointSource> checkpoint_source(FullyShardedCore& parallel,
                                                             FullyShardedOptimizerCore& optimizer);
  friend std::shared_ptr<CheckpointSource> checkpoint_source(FullyShardedCore& parallel,
                                                             ShardGossipOptimizerCore& optimizer, const Group& all);
  // A parameter in the dtype that the optimizer updates. Collective.
  at::Tensor whole(const at::Tensor& parameter, const std::string& name) const;

  std::unique_ptr<Shards> shards_;
};

// While it lives, parameters are whole, also for data_ptr(), as its options say. Collective, at both ends. Move-only;
// must not outlive its wrapper. Meanwhile forward, an optimizer's step and another one of these are UsageErrors.
class FullParameters {
 public:
  FullParameters(FullyShardedCore& core, const SummonFullParamsOptions& options);
  FullParameters(FullParameters&& other) noexcept : held_(std::exchange(other.held_, {})) {}
  FullParameters& operator=(FullParameters&&) = delete;
  ~FullParameters();  // a failure of communication shows at the next call

 private:
  std::vector<FullyShardedCore*> held_;
};

// Wraps a module, unmodified:
//
//   shoal::FullyShardedDataParallel parallel(model, world.group(), {.auto_wrap_policy =
//   shoal::wrap_type<BlockImpl>()}); shoal::FullyShardedOptimizer<shoal::FusedAdamW> optimizer(parallel,
//   torch::optim::AdamWOptions(3e-4));
//   ...
//   cross_entropy(parallel.forward(x), y).backward();
//   optimizer.step();
//   optimizer.zero_grad();
//
// Parameters keep their names, their identity and their requires_grad. They may be read anywhere by any operator, in
// forward, backward or outside; then all ranks must come to some forward, backward, step or read of their own, since a
// read may be collective. So one rank may evaluate alone, through the module's own forward. They may be loaded,
// replaced or written by operators at any time, with the same values on all ranks, as in one process; the next training
// forward or step() takes that over, compares ranks (DisagreeError), and refreshes the float32 copies. With param_dtype
// a tensor of another floating-point dtype is converted, and the copies get all its bits; else another dtype is a
// UsageError, as is a parameter that was frozen and requires a gradient now. What is written past the operators
// (data_ptr) outside of summon_full_params is lost. After backward each rank has the sums of its own ranges, and grad()
// is a tensor without memory: zero_grad() in every form drops or zeroes the sum, reading it is a UsageError that names
// the call to use (see ShardedOptimizerCore::step). Where ranks share a host, parameters lie once in memory that they
// share, and nothing is gathered. Buffers stay each rank's own. Where they are gathered, the parameters cannot be read
// any more when the wrapper has gone: call unwrap(), or take full_state_dict or visit_full_state, before.
//
// Constructor: collective. UsageError for options out of range, names that the module does not have, a module without
// trainable parameters, parameters that are not floating point or not on one device, a `device` that is not there or
// not where the module is; DisagreeError when ranks hold
// different models.
template <class Module>
class FullyShardedDataParallel : public DataParallelWrapper<Module, FullyShardedCore> {
  using Base = DataParallelWrapper<Module, FullyShardedCore>;

 public:
  FullyShardedDataParallel(std::shared_ptr<Module> module, const Group& group,
                           const FullyShardedDataParallelOptions& options = {})
      : Base(std::move(module), group, options) {}
  FullyShardedDataParallel(const torch::nn::ModuleHolder<Module>& module, const Group& group,
                           const FullyShardedDataParallelOptions& options = {})
      : FullyShardedDataParallel(module.ptr(), group, options) {}
  template <detail::BareModule Bare, class... Rest>
  explicit FullyShardedDataParallel(Bare&& module, Rest&&... rest)
      : FullyShardedDataParallel(detail::refuse_bare_module<Bare>(module), std::forward<Rest>(rest)...) {}

  // What the module's forward returns. Collective, also in evaluation. With param_dtype, floating-point tensors in the
  // arguments, however nested (engine/inputs.h), are cast to it, in copies: the caller's objects stay as they are. What
  // forward takes by a reference that is not const, for it to write to, is passed as it is.
  template <class... Arguments>
  auto forward(Arguments&&... arguments) {
    return cast_and_forward(std::index_sequence_for<Arguments...>(), std::forward<Arguments>(arguments)...);
  }

  // The same as forward().
  template <class... Arguments>
  auto operator()(Arguments&&... arguments) {
    return forward(std::forward<Arguments>(arguments)...);
  }

 private:
  template <size_t... places, class... Arguments>
  auto cast_and_forward(std::index_sequence<places...>, Arguments&&... arguments) {
    const auto cast = this->input_cast();
    return Base::forward(detail::CastInput<Arguments, detail::may_copy<places, Module, Arguments...>()>(
                             std::forward<Arguments>(arguments), cast)
                             .get()...);
  }
};

template <detail::BareModule Bare, class... Rest>
FullyShardedDataParallel(Bare&&, Rest&&...) -> FullyShardedDataParallel<std::remove_cvref_t<Bare>>;

struct FullyShardedOptimizerOptions {
  double clip_grad = 0;                       // largest norm of all gradients together; 0: no clipping
  std::optional<GradScalerOptions> scaler{};  // of the loss, for float16
};

// What FullyShardedOptimizer does, whatever the optimizer.
class FullyShardedOptimizerCore : public ShardedOptimizerCore {
 public:
  FullyShardedOptimizerCore(FullyShardedCore& parallel, ParamGroups groups,
                            std::unique_ptr<torch::optim::OptimizerOptions> defaults, const Factory& make,
                            bool element_wise, const FullyShardedOptimizerOptions& options);

 private:
  friend std::shared_ptr<CheckpointSource> checkpoint_source(FullyShardedCore& parallel,
                                                             FullyShardedOptimizerCore& optimizer);
  static ParamGroups complete(const FullyShardedCore& parallel, ParamGroups groups);
  static std::unique_ptr<State> make_state(const FullyShardedCore& parallel, bool element_wise,
                                           const FullyShardedOptimizerOptions& options);
};

// For TrainingState. Another optimizer does not see the pieces.
std::shared_ptr<CheckpointSource> checkpoint_source(FullyShardedCore& parallel, FullyShardedOptimizerCore& optimizer);
std::shared_ptr<CheckpointSource> checkpoint_source(FullyShardedCore& parallel,
                                                    torch::optim::Optimizer& optimizer) = delete;

// Any libtorch optimizer, run on each rank over its ranges; see ShardedOptimizerCore. May outlive the wrapper: it
// applies what has been summed up until then; later backwards are the caller's own, and step() refuses their gradients.
// A rank's parameters change in its own step(), and not before. Constructor: collective. UsageError for an optimizer
// that is not element-wise on a wrapper without whole_parameters, a parameter in two param groups or in none, a scaler
// where no arithmetic has 16 bits, options out of range; DisagreeError when options differ between ranks.
template <class Local>
class FullyShardedOptimizer : public FullyShardedOptimizerCore {
 public:
  template <class Defaults>
  FullyShardedOptimizer(FullyShardedCore& parallel, ParamGroups groups, const Defaults& defaults,
                        const FullyShardedOptimizerOptions& options = {})
      : FullyShardedOptimizerCore(parallel, std::move(groups), detail::default_options<Local>(defaults),
                                  detail::local_optimizer_maker<Local>(defaults), element_wise<Local>, options) {}
  // One param group of all trainable parameters.
  template <class Defaults>
  FullyShardedOptimizer(FullyShardedCore& parallel, const Defaults& defaults,
                        const FullyShardedOptimizerOptions& options = {})
      : FullyShardedOptimizer(parallel, ParamGroups(), defaults, options) {}
};

}  // namespace shoal
