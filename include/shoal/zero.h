#pragma once
// ZeRO-1 and ZeRO-2: the sharded optimizer OSS and the wrapper ShardedDataParallel.

#include <torch/optim/optimizer.h>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "shoal/detail/data_parallel.h"
#include "shoal/detail/local_optimizer.h"
#include "shoal/detail/sharded_optimizer.h"
#include "shoal/group.h"
#include "shoal/hooks.h"
#include "shoal/optim.h"
#include "shoal/precision.h"

namespace shoal {

struct OSSOptions {
  // Without shared memory: elements of parameters per broadcast; -1: the whole share of a rank.
  int64_t broadcast_buffer_size = -1;
  // Broadcast parameters in float16. All ranks, including the owner, hold the rounded values.
  bool broadcast_fp16 = false;

  // Throws UsageError that lists all faults.
  void validate() const;
};

class CheckpointSource;
class DataParallelCore;

// Number of elements that each rank owns.
struct ShareSizes {
  std::vector<int64_t> trainable;  // by rank of the group; they differ by at most `largest`
  std::vector<int64_t> frozen;     // parameters that were trainable before
  int64_t largest = 0;             // size of the largest trainable parameter
};

// Type-independent part of OSS. Use OSS.
class OSSCore : public ShardedOptimizerBase {
 public:
  // element_wise: shoal::element_wise of the local optimizer.
  OSSCore(const ParamGroups& groups, std::unique_ptr<torch::optim::OptimizerOptions> defaults, OptimizerFactory make,
          bool element_wise, const Group& group, const OSSOptions& options);

  // A step for scaled losses: unscales this rank's gradients and checks them for inf and NaN. If no rank finds any,
  // clips them to `max_norm` (0: no clipping) and steps. Updates the scaler. Returns true if it stepped. UsageError on
  // all ranks for gradients that GradScaler::unscale() has unscaled since the scaler's last update(). Collective.
  bool step(GradScaler& scaler, double max_norm = 0);
  // ShardedOptimizerBase::step, called and returning as libtorch's.
  at::Tensor step(LossClosure closure = nullptr) override { return ShardedOptimizerBase::step(std::move(closure)); }

  // Clips the gradients to a total norm of at most `max_norm` over all ranks' shares; returns the norm before clipping,
  // 0 if there are no gradients. norm_type: as for torch's clip_grad_norm_, including infinity (largest element),
  // fractions, negative numbers and 0 (number of parameters with a gradient). The result on every rank equals that
  // function applied to the whole model's averaged gradients, also with inf and NaN among them. Throws UsageError for a
  // norm_type of NaN. Gradients of a scaled loss have its scale: give step(scaler, max_norm) the norm. Collective.
  double clip_grad_norm(double max_norm, double norm_type = 2);

  // Adopts changes of requires_grad. Parameters that have become trainable join with rank 0's values. Trainable
  // elements are balanced again: if shares differ by more than the largest trainable parameter, some parameters move to
  // another rank with their state (only if the state is of a registered type, see register_state; otherwise owners
  // stay). Frozen parameters keep owner and state. Call it before a forward: ShardedDataParallel leaves gradients with
  // the owners. step() and clip_grad_norm() adopt changes, too, but move no parameter that has an owner. Throws
  // UsageError for param groups added through torch::optim::Optimizer&. Collective.
  void refresh_trainable();

  // Adds parameters, with rank 0's values. The group's options are resolved by the local optimizer. Throws UsageError
  // for a parameter that is already present and for options that the local optimizer rejects, DisagreeError if the
  // ranks add different groups; nothing changes on any rank then. Collective.
  void add_param_group(const torch::optim::OptimizerParamGroup& group) override;

  // As those of ShardedOptimizerCore; names of parameters come from the module, which may be given by its holder or a
  // pointer. Where the optimizer trains several modules, call them for each.
  OptimizerState state_dict(detail::ModuleRef module, std::optional<int> recipient = std::nullopt) const;
  void load_state_dict(detail::ModuleRef module, const OptimizerState& state);

  // Owners of the parameters that were trainable when the shares were made (constructor or refresh_trainable()) or
  // before. Equal on all ranks. Not collective.
  std::vector<std::vector<at::Tensor>> partition() const;    // by rank of the group
  int param_to_rank(const at::Tensor& parameter) const;      // rank of the group; UsageError for an unknown parameter
  size_t param_to_index(const at::Tensor& parameter) const;  // index among the parameters of all param groups
  std::vector<at::Tensor> local_params() const;              // this rank's share
  ShareSizes share_sizes() const;

  struct State;

 private:
  friend std::shared_ptr<CheckpointSource> checkpoint_source(DataParallelCore& parallel, OSSCore& optimizer);
  friend class ShardedDataParallelCore;
  friend class ElasticAccess;  // src/elastic/access.h
  void require_regroupable(const Group& job);
  bool shards_across_hosts() const;
  bool needs_second_owners(const Group& job) const;
  bool has_owner(const at::Tensor& parameter) const;
  void regroup(const Group& group, int64_t step);
  State& state() const;
};

// For TrainingState. parallel: DistributedDataParallel or ShardedDataParallel.
std::shared_ptr<CheckpointSource> checkpoint_source(DataParallelCore& parallel, OSSCore& optimizer);

// OSS: optimizer with state sharded over ranks by whole parameters, after fairscale's OSS. Method: ZeRO-1 (Rajbhandari
// et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020).
//
// Wraps any libtorch optimizer that updates parameters independently of each other: SGD, Adam, AdamW, RMSprop, Adagrad,
// and shoal's own. Schedulers work on it, param groups keep their own options, and options may change between steps.
//
//   shoal::OSS<torch::optim::AdamW> optimizer(model->parameters(), torch::optim::AdamWOptions(1e-3), world.group());
//
// Each parameter is owned by one rank, which alone keeps its state and updates it. Parameters are assigned in the order
// in which backward produces gradients (last parameter first), always to the rank with the smallest share. Shares
// therefore differ by at most the largest parameter, and gradients for all ranks become ready throughout backward.
//
// If the ranks of the group share a host, trainable parameters move to shared memory: there is one copy of them, and a
// step transfers nothing. The destructor gives each rank a private copy again.
//
// Parameters may be loaded, replaced or written at any time (torch::load, Module::load, set_data, in-place operators,
// also through data()), with the same values on all ranks. A rank sees its own change at once, and the next step()
// shares it; step() throws DisagreeError if values differ. The shares are rebuilt after Module::to(dtype) and when a
// parameter of the param groups is unfrozen. Parameters may exchange their memory; step() throws UsageError for two
// that are on the same memory. Writes through data_ptr() are not detected: make them on the owner.
//
// Constructor: collective. Broadcasts rank 0's values. Throws DisagreeError if the ranks' parameters differ in number,
// shape, dtype or options; UsageError for a parameter in two param groups, for parameters or options that the local
// optimizer rejects, for L-BFGS, and for invalid options.
template <class Local>
class OSS : public OSSCore {
 public:
  // Local: the optimizer class that updates this rank's share; defaults: its options.
  template <class Defaults>
  OSS(std::vector<at::Tensor> parameters, const Defaults& defaults, const Group& group, const OSSOptions& options = {})
      : OSS(ParamGroups{torch::optim::OptimizerParamGroup(std::move(parameters))}, defaults, group, options) {}
  template <class Defaults>
  OSS(const ParamGroups& groups, const Defaults& defaults, const Group& group, const OSSOptions& options = {})
      : OSSCore(groups, detail::default_options<Local>(defaults), detail::local_optimizer_maker<Local>(defaults),
                element_wise<Local>, group, options) {}
};

struct Gradient;

struct ShardedDataParallelOptions {
  // Behaviour.
  bool broadcast_buffers = true;  // broadcast rank 0's buffers before each synchronising forward
  // Broadcast rank 0's parameters and buffers in the constructor; off: buffers and frozen parameters keep each rank's
  // values (OSS has already broadcast the trainable ones).
  bool sync_models_at_startup = true;
  bool auto_refresh_trainable = true;   // the next forward adopts changes of requires_grad, dtype or device; off: it
                                        // throws UsageError
  bool find_unused_parameters = false;  // allow parameters that no rank uses in a step; walks the graph
  // Accumulate and reduce gradients of 16-bit parameters in float32. grad() is float32 under no_sync() and rounded to
  // the parameter's dtype after the reduction.
  bool grad_reduce_in_fp32 = false;
  std::vector<std::string> ignored{};  // names of parameters and buffers that shoal does not touch
  Precision precision{};               // only `compute` is applied, as autocast in forward; convert the module and
                                       // scale the loss yourself
  std::shared_ptr<CommunicationHook> communication_hook{};  // replaces the reduce of a bucket to its owner
  std::shared_ptr<BufferHook> buffer_hook{};                // replaces the broadcast of rank 0's buffers
  BufferHookLocation buffer_hook_location = BufferHookLocation::pre_forward;
  bool log_sizes = true;  // rank 0 prints the sizes of the model, the shares and the buckets to standard error

  // Performance.
  int64_t reduce_buffer_size = 1 << 23;  // elements per bucket; less for small models, so that every rank has at least
                                         // four buckets and communication overlaps with backward, and on one host,
                                         // without a hook, about 4 MiB
  bool reduce_fp16 = false;              // reduce gradients in float16 (CompressHook); grad() and micro-batches keep
                                         // the parameter's dtype. Not together with communication_hook

  // Throws UsageError that lists all faults.
  void validate() const;
};

class ShardedDataParallelCore : public DataParallelCore {
 public:
  ShardedDataParallelCore(std::shared_ptr<torch::nn::Module> module, std::vector<OSSCore*> optimizers,
                          const Group& group, const ShardedDataParallelOptions& options);
  ~ShardedDataParallelCore() override;
  // Adopts changes of requires_grad, dtype or device: calls refresh_trainable() of the optimizers, then rebuilds the
  // buckets. Forward calls it automatically unless auto_refresh_trainable is off; then a forward after such a change
  // throws UsageError, which names the parameter, until it is called. Collective.
  void refresh_trainable();

  // Reduces gradients that are in grad() and not reduced yet, without a backward: accumulated under no_sync, or set by
  // hand. A rank without gradients contributes zeros; sums of earlier steps are kept and added to. Counts as a step,
  // also within no_sync. Throws UsageError within a backward. Collective.
  void reduce();

 protected:
  void prepare() override;

 private:
  friend class ElasticAccess;
  void require_regroupable(const torch::optim::Optimizer& optimizer) const;
  void regroup(int64_t step);
  void require_second_owners() const;
  void send_to_second_owners();

  struct Sharding;
  void share();
  void freeze();
  std::vector<int> share_gradients(std::vector<Gradient>& gradients) const;
  std::vector<int64_t> times_shared() const;
  bool are_shares_balanced() const;
  [[noreturn]] void refuse_changes() const;
  std::shared_ptr<Sharding> sharding_;
};

// ShardedDataParallel: wrapper that reduces each gradient only to the rank that owns its parameter, after fairscale's
// ShardedDataParallel. Method: ZeRO-2 (Rajbhandari et al., SC 2020). After backward, grad() of the parameters that this
// rank owns is the mean over ranks. For other parameters it is a tensor without memory: reading it is a UsageError that
// names the right call; zero_grad() works as usual.
//
//   shoal::OSS<torch::optim::AdamW> optimizer(model->parameters(), torch::optim::AdamWOptions(1e-3), world.group());
//   shoal::ShardedDataParallel parallel(model, optimizer, world.group());
//   ...
//   cross_entropy(parallel.forward(x), y).backward();
//   optimizer.step();
//   optimizer.zero_grad();
//
// With OSS over world.group().by_host() and the wrapper over world.group(), each host has all shards: gradients are
// summed to their owners within the host, and then between the owners of the hosts. If hosts run different numbers of
// ranks, as many of each own parameters as the smallest host has; the wrapper's constructor then shares them anew.
// Forward compares values that were written or replaced over all hosts (DisagreeError), and the constructor options;
// options that differ later, and optimizer state that is loaded, must be equal on all hosts. UsageError without
// sync_models_at_startup, with broadcast_fp16, and with a communication_hook or reduce_fp16 where hosts run different
// numbers of ranks.
//
// The optimizers must outlive the wrapper. Each trainable parameter belongs to exactly one of them (UsageError names
// those that do not). Without zero_grad between synchronised backwards, gradients accumulate on their owners. Call
// forward of the wrapper, not of the module. All parameters must be on devices of one type (UsageError). A step reduces
// every gradient to its owner, about (ranks - 1) / ranks of the bytes that DDP sends, plus a small all-reduce in which
// ranks exchange which gradients they used.
template <class Module>
class ShardedDataParallel : public detail::DataParallelWrapper<Module, ShardedDataParallelCore> {
  using Base = detail::DataParallelWrapper<Module, ShardedDataParallelCore>;

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
