#pragma once
// FullyShardedDataParallel: data parallelism with parameters, gradients and optimizer state sharded over ranks. The
// parameters of a unit are gathered only while they are in use. Method: ZeRO-3 (Rajbhandari et al., SC 2020) as in
// PyTorch FSDP (Zhao et al., VLDB 2023).

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

struct ShardGroups;

enum class ShardingStrategy {
  full_shard,     // parameters are gathered for each use in forward and backward
  shard_grad_op,  // parameters stay gathered from forward to the end of backward
  no_shard,       // parameters are replicated, as in DistributedDataParallel
  hybrid_shard,   // full_shard within a host, replicated over hosts; where hosts have different numbers of ranks, as
                  // many of each own parameters, whole ones, as the smallest has
  hybrid_shard_grad_op,  // shard_grad_op within a host, replicated over hosts
};

struct FullyShardedDataParallelOptions {
  // Behaviour.
  ShardingStrategy sharding_strategy = ShardingStrategy::full_shard;
  std::optional<at::Device> device{};  // device to which a CPU module is moved; none: it is not moved. Without an
                                       // index, the current device of that type is used, with a warning
  std::optional<WrapPolicy> auto_wrap_policy{};  // sub-modules that become units; none: the module is one unit
  std::optional<int> shard_size{};  // hybrid: number of consecutive ranks that share one copy of the model;
                                    // none: the ranks of a host, wherever they are in the group
  // Start from rank 0's parameters and buffers; off: from each rank's own values in the ranges that it owns. Ranks that
  // own the same range (hybrid, no_shard) must then have the same values.
  bool sync_module_states = true;
  bool shard_by_parameter = false;                // shard by whole parameters, for optimizers that are not element-wise
                                                  // (shoal::element_wise); off: by equal ranges of elements
  Precision precision{};                          // only `compute` is applied, as autocast in forward; the module gives
                                                  // the dtype of parameters, the optimizer has the scaler
  std::optional<at::ScalarType> param_dtype{};    // dtype of floating-point parameters and inputs of forward; each rank
                                                  // keeps a float32 copy of its own shards, but not of frozen
                                                  // parameters that have this dtype already
  std::optional<at::ScalarType> reduce_dtype{};   // dtype of the gradient reduction; none: the parameters' dtype
  std::optional<at::ScalarType> buffer_dtype{};   // dtype of floating-point buffers; full_state_dict returns them in
                                                  // their original dtype
  bool cpu_offload = false;                       // shards, reduced gradients and updates on the CPU. A CPU module has
                                                  // them there anyway; other devices are not supported yet
  std::vector<std::string> ignored_modules{};     // names of sub-modules that are not sharded; '' is the module itself,
                                                  // with a warning
  std::vector<std::string> ignored_parameters{};  // names of parameters and buffers that are not sharded
  std::shared_ptr<CommunicationHook> communication_hook{};  // replaces the reduce-scatter; with no_shard and hybrid
                                                            // strategies, the all-reduce between replicas

  // Performance. These have no effect if the ranks share memory: parameters then exist once per host.
  size_t unit_limit = 3;  // maximum number of units in memory; an operator that needs more at once throws UsageError
  size_t prefetch_units = 1;  // of these, number of units gathered ahead of use; 0: none
  // Maximum bytes of gathered parameters, where a prefetched unit counts as the largest one. Buffers are reused and may
  // be up to a quarter larger than the unit.
  std::optional<int64_t> byte_limit{};

  // Debugging.
  // Compare the order of gathered units over ranks: the next forward throws DisagreeError if it differs; a change from
  // one pass to the next is warned of once.
  bool check_unit_order = false;

  // Throws UsageError with a list of all invalid options.
  void validate() const;
};

// Options of summon_full_params(). Equal on all ranks.
struct SummonFullParamsOptions {
  bool writeback = true;    // keep what each rank writes to the ranges that it owns; write the same on all ranks. Off:
                            // changes are discarded
  bool rank0_only = false;  // gather on rank 0 of the group only; parameters remain sharded on other ranks. Not with
                            // writeback
  bool offload_to_cpu = false;  // supported for modules on the CPU only, where it has no effect
  bool with_grads = false;  // grad() holds the full reduced gradient in the parameter's dtype, if there is one; with
                            // writeback, changes of it are kept too
  bool recurse = true;      // include units made by auto_wrap_policy and sub-modules with their own wrapper; off: only
                            // the unit of the module itself
};

// Callback that receives a name and a full tensor, which it may keep.
using StateVisitor = std::function<void(const std::string& name, const at::Tensor& value)>;

class CheckpointSource;
class FullParameters;
class FullyShardedOptimizerCore;
class ShardGossipOptimizerCore;

// Type-independent part of FullyShardedDataParallel.
class FullyShardedCore : public DataParallelCore {
 public:
  struct Shards;
  FullyShardedCore(std::shared_ptr<torch::nn::Module> module, const Group& group,
                   const FullyShardedDataParallelOptions& options);
  ~FullyShardedCore() override;

  // Scope for all micro-batches but the last: backward reduces gradients within a host only, and the first backward
  // after the scope reduces the accumulated sums over hosts. Like set_requires_all_reduce(false) of FSDP2. Gradients
  // take the memory of one shard, where no_sync takes the full size, and cross hosts once per step instead of once per
  // micro-batch. The scope at the time of backward counts; let it cover forward too. Weights of backward(loss_sum,
  // weight) accumulate as under no_sync. Without a hybrid strategy there is nothing to defer, and every backward
  // reduces completely. UsageError for an optimizer step before the deferred reduction, and within a Join.
  //   const auto scope = parallel.defer_all_reduce(micro + 1 < micros);
  [[nodiscard]] NoSync defer_all_reduce(bool defer = true);

  // Clips the reduced gradients to a total norm of at most `max_norm` over all shards; returns the norm before
  // clipping. norm_type: positive, or infinity. Call it between backward and step. If the optimizer has a scaler,
  // gradients are unscaled first, and step() does not unscale them again. Collective.
  double clip_grad_norm_(double max_norm, double norm_type = 2);

  // Scope in which parameters can be read and written as if they were not sharded. Throws UsageError for rank0_only
  // with writeback, for offload_to_cpu with a module that is not on the CPU, and within another such scope;
  // DisagreeError if the ranks pass different options. Collective.
  //   const auto full = parallel.summon_full_params({.writeback = false, .with_grads = true});
  [[nodiscard]] FullParameters summon_full_params(const SummonFullParamsOptions& options);
  [[nodiscard]] FullParameters summon_full_params(bool writeback = true);

  // Full parameters, in the dtype that the optimizer updates, and buffers, by name. Copies, on rank `recipient` of the
  // group only (empty elsewhere); none: on every rank. Within summon_full_params() they have what this rank has written
  // there. Collective.
  std::map<std::string, at::Tensor> full_state_dict(std::optional<int> recipient = std::nullopt) const;

  // Visits the tensors of full_state_dict() one at a time, in the same order on all ranks, for models larger than a
  // rank's memory: a rank holds at most one full tensor beside its shards, unless `visit` keeps it. A tensor with
  // several names is visited once per name. An exception of `visit` is rethrown after the other ranks have done their
  // part. Collective.
  void visit_full_state(std::optional<int> recipient, const StateVisitor& visit) const;

  // Restores the module for use without this wrapper (another wrapper, torch::save, evaluation): full parameters in
  // memory of its own. With param_dtype, parameters return to float32 with the optimizer's values, and buffers to their
  // original dtype. Gradients are dropped. Any later use of this wrapper or its optimizer is a UsageError; so is a call
  // within summon_full_params(). Collective.
  void unwrap();

  std::string open_scope() const override;
  // Names of the parameters of each unit, including frozen ones, in the expected order of first use.
  std::vector<std::vector<std::string>> units() const;
  // True if parameters exist once per host, in shared memory.
  bool shared() const;
  // Shards of this rank: of the trainable parameters, as the optimizer updates them, and of the reduced gradients.
  std::vector<at::Tensor> own_parameters() const;
  std::vector<at::Tensor> own_gradients() const;
  // Those of the gradients that exist, with what the caller did to grad(): dropped, zeroed or set. UsageError for
  // gradients that ranks have not summed.
  std::vector<at::Tensor> summed_gradients();
  // Groups in which it communicates: of all ranks, of those that share a model, of those with equal shards, and of the
  // gathers. A group may be there several times.
  std::vector<Group> groups() const;

 protected:
  TensorCast input_cast() const;
  // Shards of this rank of the trainable parameters in the module's dtype, which 16-bit parameters have beside what the
  // optimizer updates.
  std::vector<at::Tensor> own_elements() const;
  void adopt_changes(bool training) override;
  void begin_forward(bool training) override;
  void end_forward(bool training) override;

 private:
  friend class FullParameters;
  // The wrappers of sub-modules are not included.
  void check_hold(const SummonFullParamsOptions& options) const;
  void hold(const SummonFullParamsOptions& options, bool reads_only);
  void release();
  // Ends the scope on this rank, without the others, and drops what release() has not kept.
  void drop_hold() noexcept;

  friend class ElasticAccess;  // src/elastic/access.h
  void require_regroupable();
  std::vector<at::Tensor> frozen_copies() const;
  void compute_shares(bool now);
  void meet_behind_share();
  bool needs_second_owners(const Group& job) const;

  friend class FullyShardedOptimizerCore;
  friend std::shared_ptr<CheckpointSource> checkpoint_source(FullyShardedCore& parallel,
                                                             FullyShardedOptimizerCore& optimizer);
  friend std::shared_ptr<CheckpointSource> checkpoint_source(FullyShardedCore& parallel,
                                                             ShardGossipOptimizerCore& optimizer, const Group& all);
  void connect_reducer();
  // UsageError that names what has no second owners.
  void require_second_owners() const;
  void regroup(const ShardGroups& groups, int64_t step, bool filled);
  // Full value of a parameter in the dtype that the optimizer updates. Collective.
  at::Tensor whole(const at::Tensor& parameter, const std::string& name) const;

  std::unique_ptr<Shards> shards_;
};

// Scope of summon_full_params(): parameters are gathered and remain in memory, also for data_ptr(). Every rank has them
// in memory of its own, also where ranks share memory, and sees its own writes only. Pointers into that memory must not
// outlive the scope. Where ranks share memory, writes past the operators to parameters that the scope leaves out
// (recurse, rank0_only) change them on all ranks, and stay. Construction and destruction are collective. Move-only;
// must not outlive its wrapper. Within the scope, forward, an optimizer step and a second scope are UsageErrors.
class FullParameters {
 public:
  // reads_only: nothing is written past the operators, so that ranks that share memory need no copies.
  FullParameters(FullyShardedCore& core, const SummonFullParamsOptions& options, bool reads_only = false);
  FullParameters(FullParameters&& other) noexcept : held_(std::exchange(other.held_, {})) {}
  FullParameters& operator=(FullParameters&&) = delete;
  ~FullParameters();  // throws nothing: communication errors are thrown by the next call
  // Ends the scope before its destruction. Throws what fails there, and what WorldOptions::while_waiting throws.
  void end();

 private:
  std::vector<FullyShardedCore*> held_;
};

// Wrapper for sharded training of an unmodified module, after torch.distributed.fsdp.FullyShardedDataParallel.
//
//   shoal::FullyShardedDataParallel parallel(model, world.group(),
//                                            {.auto_wrap_policy = shoal::wrap_type<BlockImpl>()});
//   shoal::FullyShardedOptimizer<shoal::FusedAdamW> optimizer(parallel, torch::optim::AdamWOptions(3e-4));
//   ...
//   cross_entropy(parallel.forward(x), y).backward();
//   optimizer.step();
//   optimizer.zero_grad();
//
// Parameters keep their names, identity and requires_grad. Any operator may read them anywhere: in forward, in backward
// or outside. Such a read may be collective, so the other ranks must reach a forward, backward, step or read of their
// own. One rank may therefore evaluate alone, through the module's own forward. If the ranks share a host, parameters
// exist once in shared memory and nothing is gathered. Buffers are not synchronised after construction.
//
// Operators may load, replace or write parameters at any time, with the same values on all ranks. The next training
// forward or step() adopts the new values, compares the ranks (DisagreeError) and refreshes the float32 copies. With
// param_dtype, a tensor of another floating-point dtype is converted and its full precision goes into the float32
// copies; without it, another dtype is a UsageError, as is a parameter that was frozen at construction and now requires
// a gradient. Writes through data_ptr() outside of summon_full_params() are lost. Saves, full_state_dict() and
// state_dict() show the values in place and adopt nothing: the program may put its own back afterwards.
//
// If the program swaps averaged weights in and back out (an evaluation, summon_full_params()), the float32 copies are
// restored bit for bit: an element gets its bits back if it comes back as it was before the first change since the last
// step(). For that each rank keeps a second copy of the changed shards until the next step(). If the program replaces a
// parameter's memory, a tensor that it took of the former memory (own = p.data()) keeps its values. Over sockets,
// tensors that it took by data() from other parameters of the unit then no longer refer to them: call data() again.
//
// After backward each rank holds the reduced gradients of its own shards, and grad() is a tensor without memory. All
// forms of zero_grad() drop or zero the reduced gradient. Reading grad() is a UsageError that names the right call (see
// ShardedOptimizerCore::step).
//
// Gathered parameters can no longer be read once the wrapper is destroyed: call unwrap(), full_state_dict() or
// visit_full_state() before.
//
// Constructor: collective. Throws UsageError for invalid options, names that the module does not have, a module without
// trainable parameters, parameters that are not floating point or not all on one device, and a `device` that does not
// exist or differs from the module's; DisagreeError if the ranks hold different models.
template <class Module>
class FullyShardedDataParallel : public detail::DataParallelWrapper<Module, FullyShardedCore> {
  using Base = detail::DataParallelWrapper<Module, FullyShardedCore>;

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

  // Runs the module's forward and returns its result. Collective, also in evaluation. With param_dtype, floating-point
  // tensors in the arguments, however nested (shoal/forward_tensors.h), are copied and cast; the caller's objects are
  // unchanged. Arguments that forward takes by non-const reference are passed as they are.
  template <class... Arguments>
  auto forward(Arguments&&... arguments) {
    return detail::with_cast_inputs<Module>(
        std::index_sequence_for<Arguments...>(), this->input_cast(),
        [this](auto&&... inputs) { return this->Base::forward(std::forward<decltype(inputs)>(inputs)...); },
        std::forward<Arguments>(arguments)...);
  }

  // The same as forward().
  template <class... Arguments>
  auto operator()(Arguments&&... arguments) {
    return forward(std::forward<Arguments>(arguments)...);
  }
};

template <detail::BareModule Bare, class... Rest>
FullyShardedDataParallel(Bare&&, Rest&&...) -> FullyShardedDataParallel<std::remove_cvref_t<Bare>>;

struct FullyShardedOptimizerOptions {
  double clip_grad = 0;                       // maximum norm of all gradients together; 0: no clipping
  std::optional<GradScalerOptions> scaler{};  // loss scaler, for float16
};

// Type-independent part of FullyShardedOptimizer.
class FullyShardedOptimizerCore : public ShardedOptimizerCore {
 public:
  FullyShardedOptimizerCore(FullyShardedCore& parallel, ParamGroups groups,
                            std::unique_ptr<torch::optim::OptimizerOptions> defaults, const OptimizerFactory& make,
                            bool element_wise, const FullyShardedOptimizerOptions& options);

 protected:
  // UsageError unless it is this wrapper's optimizer.
  void require_own(const FullyShardedCore& parallel) const;
  // As ElasticAccess::regroup(); `groups` are those of the wrapper.
  void regroup(FullyShardedCore& parallel, const ShardGroups& groups, const Group& job, int64_t step);

 private:
  friend std::shared_ptr<CheckpointSource> checkpoint_source(FullyShardedCore& parallel,
                                                             FullyShardedOptimizerCore& optimizer);
  friend class ElasticAccess;
  virtual void require_regroupable(const FullyShardedCore& parallel, const Group& job);
  virtual void regroup(FullyShardedCore& parallel, const Group& job, int64_t step);
  static ParamGroups complete(const FullyShardedCore& parallel, ParamGroups groups);
  static std::unique_ptr<State> make_state(const FullyShardedCore& parallel, bool element_wise,
                                           const FullyShardedOptimizerOptions& options);
};

// For TrainingState. Only a FullyShardedOptimizer has access to the shards.
std::shared_ptr<CheckpointSource> checkpoint_source(FullyShardedCore& parallel, FullyShardedOptimizerCore& optimizer);
std::shared_ptr<CheckpointSource> checkpoint_source(FullyShardedCore& parallel,
                                                    torch::optim::Optimizer& optimizer) = delete;

// Optimizer for FullyShardedDataParallel: runs a libtorch optimizer on this rank's shards; see ShardedOptimizerCore. It
// may outlive the wrapper: it applies the gradients reduced until then, and step() refuses later ones. A rank's
// parameters change only in its own step().
//
// Constructor: collective. Throws UsageError for an optimizer that is not element-wise on a wrapper without
// shard_by_parameter, a parameter in two param groups or in none, a scaler without 16-bit arithmetic, and invalid
// options; DisagreeError if the ranks pass different options.
template <class Local>
class FullyShardedOptimizer : public FullyShardedOptimizerCore {
 public:
  template <class Defaults>
  FullyShardedOptimizer(FullyShardedCore& parallel, ParamGroups groups, const Defaults& defaults,
                        const FullyShardedOptimizerOptions& options = {})
      : FullyShardedOptimizerCore(parallel, std::move(groups), detail::default_options<Local>(defaults),
                                  detail::local_optimizer_maker<Local>(defaults), element_wise<Local>, options) {}
  // One param group with all trainable parameters.
  template <class Defaults>
  FullyShardedOptimizer(FullyShardedCore& parallel, const Defaults& defaults,
                        const FullyShardedOptimizerOptions& options = {})
      : FullyShardedOptimizer(parallel, ParamGroups(), defaults, options) {}
};

}  // namespace shoal
