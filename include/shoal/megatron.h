#pragma once
// DistributedOptimizer: gradients in contiguous buffers, of which each rank reduces, updates and publishes an equal
// range, regardless of parameter boundaries. After Megatron-LM's DistributedOptimizer. Method: ZeRO (Rajbhandari et
// al., SC 2020).

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/optimizer.h>

#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "shoal/detail/data_parallel.h"
#include "shoal/detail/local_optimizer.h"
#include "shoal/detail/range.h"
#include "shoal/detail/sharded_optimizer.h"
#include "shoal/group.h"
#include "shoal/hooks.h"
#include "shoal/optim.h"
#include "shoal/precision.h"
#include "shoal/telemetry.h"

namespace shoal {

struct DistributedOptimizerOptions {
  // Behaviour.
  bool overlap_grad_reduce = true;  // reduce buckets during backward; off: in reduce_model_grads(), which step() calls
  // Step() does not wait for the other ranks' ranges; an operator that first uses a parameter of a bucket does.
  // data_ptr() throws c10::Error before that, see finish_param_sync().
  bool overlap_param_gather = false;
  // Parameters keep their own memory, and updated ranges are gathered in the gradient buffer and copied to them. A step
  // therefore overwrites main_grad(), and a second step before zero_grad() is a UsageError. Requires an element-wise
  // optimizer. Off: parameters are views of a buffer that exists once per host, and nothing is copied.
  bool reuse_grad_buf_for_param_gather = false;
  // Each host has all shards, divided among its ranks: gradients are summed within the host and then between the ranks
  // of the hosts that own the same, and parameters stay on the host. What num_distributed_optimizer_instances is to
  // Megatron, with one instance per host. Off: one copy of the shards, over all ranks.
  bool shard_within_host = false;
  bool grad_reduce_in_fp32 = false;           // accumulate and reduce gradients of 16-bit parameters in float32
  double clip_grad = 0;                       // maximum norm of all gradients together; 0: no clipping
  bool log_num_zeros_in_grad = false;         // count the zero elements of the gradients
  std::optional<GradScalerOptions> scaler{};  // loss scaler; required if a parameter is float16, and then applies to
                                              // all gradients; for bfloat16 only with dynamic = false
  std::vector<std::string> ignored{};         // names of parameters and buffers that shoal does not touch. With several
                                       // chunks: in every chunk that has the name, or in one chunk: "chunk1.fc.weight"
  // The ranks that together hold one replica of the model (pipeline stages, tensor-parallel ranks), including this one.
  // They share the norm for clipping, skip a step together on inf, and have one loss scale. Set it on all ranks of all
  // replicas. step() is then collective over these ranks too.
  std::optional<Group> model_parallel_group{};
  std::shared_ptr<CommunicationHook> communication_hook{};  // replaces the reduce-scatter of a bucket
  std::shared_ptr<Timers> timers{};                         // measure the parts of a step; nullptr: no cost

  // Performance.
  int64_t bucket_size = 40'000'000;  // elements of gradients per reduce-scatter, with overlap_grad_reduce

  // Throws UsageError with a list of all invalid options.
  void validate() const;
};

// Position of a shard of a parameter; all ranges are in elements.
struct ParameterRange {
  std::string name;
  size_t chunk = 0;   // index of the model chunk
  size_t buffer = 0;  // index of the gradient buffer within the chunk
  Range world;        // within the buffer
  Range local;        // within the rank's view of the buffer
  Range parameter;    // within the parameter, in memory order
};

class CheckpointSource;
class Reducer;
struct ModuleTensors;

// Type-independent part of DistributedOptimizer. Use DistributedOptimizer.
class DistributedOptimizerCore : public ShardedOptimizerCore, public Joinable {
 public:
  using Modules = std::vector<std::shared_ptr<torch::nn::Module>>;

  DistributedOptimizerCore(const Modules& chunks, ParamGroups groups,
                           std::unique_ptr<torch::optim::OptimizerOptions> defaults, const OptimizerFactory& make,
                           bool element_wise, const Group& group, const DistributedOptimizerOptions& options);
  ~DistributedOptimizerCore() override;

  // Backward of a loss that is a sum over `weight` samples or tokens; see DataParallelCore::backward. Throws
  // UsageError with several chunks: weight the loss instead.
  void backward(const at::Tensor& loss_sum, double weight);
  // Scope in which backward only accumulates into the gradient buffers.
  [[nodiscard]] NoSync no_sync(bool accumulate = true);
  // See DataParallelCore.
  std::string open_scope() const;
  // Communication of a step for which this rank has no batch, in a Join scope. Does nothing if backward does not
  // reduce. step() must be called on every rank in any case. Collective.
  void shadow() override;
  // Reduces the accumulated gradients: first over the groups declared with all_reduce_grads(), then averaged over the
  // ranks and scattered. For overlap_grad_reduce = false; UsageError otherwise. Collective.
  void reduce_model_grads();
  // Waits for the parameters that other ranks have updated in the last step (overlap_param_gather). Operators wait by
  // themselves; torch::save(module) and data_ptr() throw c10::Error until an operator or this function has waited. Not
  // collective.
  void finish_param_sync();
  // Declares that gradients of these parameters are summed over `group` before the reduction (pipeline stages that
  // share an embedding, sequence-parallel ranks); ranks that did not use them contribute zeros. Norms and counts
  // include them on the group's lowest rank only. `name`, such as "embedding", appears in timers and logs. Collective
  // over `group`. Throws UsageError with overlap_grad_reduce, for tensors that are not parameters of this optimizer or
  // that the group sums already, and if clip_grad, scaler or log_num_zeros_in_grad would differ on the group's ranks
  // (they must be in model_parallel_group); DisagreeError if the group's ranks declare different shapes.
  void all_reduce_grads(const std::vector<at::Tensor>& parameters, const Group& group,
                        const std::string& name = "declared");
  // Declares that all ranks of `group` hold these parameters and compute the same gradients (layer norms of
  // tensor-parallel ranks): norms and counts include them on the group's lowest rank only. Throws UsageError for
  // tensors that are not parameters of this optimizer, and if model_parallel_group does not contain the group's ranks.
  void count_once(const std::vector<at::Tensor>& parameters, const Group& group);

  // Abandons a step that this rank cannot finish: the other ranks get StepAbandoned from their backward. Collective
  // with their step. Does nothing in a catch block of such a StepAbandoned, so that all ranks may have the same
  // handler. Elsewhere between two steps it abandons the next one: the optimizer cannot tell whether a forward has
  // begun.
  void abandon_step();

  // View of the parameter's gradient in the gradient buffer. Before the reduction it holds this rank's accumulated
  // gradients and may be modified. After it, only this rank's range is valid; after zero_grad(), nothing until the next
  // gradient. Undefined if another rank owns the whole parameter and this rank has no gradient of it.
  at::Tensor main_grad(const at::Tensor& parameter) const;
  // Shards owned by a rank of group() (default: this rank), in buffer order.
  std::vector<ParameterRange> param_range_map(std::optional<int> rank = std::nullopt) const;
  // All ranks that train together, also with shard_within_host.
  const Group& group() const override;
  // Options and statistics of the optimizer on this rank; times of chunks are added up. Call it between steps. Not
  // collective.
  LoggingData logging_data() const;
  // The chunks.
  const Modules& modules() const;

 private:
  friend std::shared_ptr<CheckpointSource> checkpoint_source(DistributedOptimizerCore& optimizer);
  static std::unique_ptr<State> make_state(const Modules& chunks, bool element_wise, const Group& group,
                                           const DistributedOptimizerOptions& options);
  friend class ElasticAccess;  // src/elastic/access.h
  void require_regroupable() const;
  bool needs_second_owners(const Group& job) const;
  bool shards_across_hosts() const;
  void regroup(const Group& group, int64_t step);
  void before_backward(std::function<void()> listener);
  void set_share(std::optional<double> share);
  Reducer& reducer() const;
  ModuleTensors tensors() const;
  // For Join.
  void check_shadow() const override;
  void settle() override;
  void set_join_state(const std::optional<JoinState>& join_state) override;
  void broadcast_model(int rank) override;

  void connect_chunks();
  // UsageError that names what has no second owners.
  void require_second_owners() const;
  void complete_gradients() override;
  void end_gradients() override;

  struct Reduction;
  std::unique_ptr<Reduction> reduction_;
};

// For TrainingState.
std::shared_ptr<CheckpointSource> checkpoint_source(DistributedOptimizerCore& optimizer);

// Sharded mixed-precision optimizer around any libtorch optimizer. An element-wise optimizer (shoal::element_wise)
// updates ranges that may cut parameters; for other optimizers each parameter is owned by one rank.
//
//   shoal::DistributedOptimizer<shoal::FusedAdamW> optimizer(model, torch::optim::AdamWOptions(1e-3), world.group());
//   ...
//   cross_entropy(model->forward(x), y).backward();
//   optimizer.step();
//   optimizer.zero_grad();
//
// The module needs no wrapper. Its trainable parameters move to one buffer per dtype, which exists once per host if the
// ranks share memory (unless reuse_grad_buf_for_param_gather is set), and its gradients to another. After backward the
// buffers hold the reduced gradients, and grad() is a tensor without memory: all forms of zero_grad() drop or zero the
// reduced gradient, and reading grad() is a UsageError that names the right call (see ShardedOptimizerCore::step). The
// same holds before the reduction (no_sync(), overlap_grad_reduce = false), when main_grad() gives this rank's own
// gradients. For 16-bit parameters each rank keeps a float32 main copy of its own ranges and float32 optimizer state.
// Batch-norm buffers are not synchronised.
//
// Parameters may be loaded, replaced or written at any time (see OSS): the next step() adopts the values, also in the
// main copies, and applies the current gradients to them. step() throws UsageError and does nothing for a parameter
// whose dtype has changed (Module::to) and for one that was frozen at construction and now requires a gradient: revert
// the change, or construct a new optimizer.
//
// Constructor: collective. Broadcasts rank 0's values. Throws UsageError for a dtype other than float16, bfloat16,
// float32 and float64 (which is treated like float32), for float16 without a scaler, for a scaler if all parameters are
// float32, for a parameter in two chunks, and for invalid options; DisagreeError if the ranks hold different models or
// options.
//
// shard_within_host: on hosts with different numbers of ranks whole parameters are owned, by as many ranks of each host
// as the smallest one has. Throws UsageError there with reuse_grad_buf_for_param_gather or a communication_hook, and
// with a model_parallel_group that has further ranks of `group`. Optimizer state that is loaded, and options that are
// changed, must be equal on all hosts.
//
// Several chunks: their gradients are reduced chunk by chunk, last chunk first, in the same order on every rank,
// whatever chunks the rank has run; a chunk that it has not run contributes zeros. A chunk's buckets are reduced during
// its own backward. If one backward passes through several chunks, those of the last chunk are reduced during it, the
// others at its end.
//
// Timers: level 0 "optimizer" (step()); level 1 "declared-grads-all-reduce" (or another name, see all_reduce_grads),
// "grads-reduce-scatter" (with overlap_grad_reduce: only the time not hidden by backward), "params-all-gather" (with
// overlap_param_gather: only the time not hidden by the next forward, once per bucket); level 2
// "optimizer-unscale-and-check-inf", "optimizer-clip-main-grad", "optimizer-inner-step". Overlapped parts have no
// barrier.
template <class Local>
class DistributedOptimizer : public DistributedOptimizerCore {
 public:
  // Several modules are the chunks of one model (virtual pipeline stages) under one optimizer.
  template <class Defaults>
  DistributedOptimizer(const Modules& chunks, ParamGroups groups, const Defaults& defaults, const Group& group,
                       const DistributedOptimizerOptions& options = {})
      : DistributedOptimizerCore(chunks, std::move(groups), detail::default_options<Local>(defaults),
                                 detail::local_optimizer_maker<Local>(defaults), element_wise<Local>, group, options) {}
  // One param group with all trainable parameters.
  template <class Defaults>
  DistributedOptimizer(const Modules& chunks, const Defaults& defaults, const Group& group,
                       const DistributedOptimizerOptions& options = {})
      : DistributedOptimizer(chunks, ParamGroups(), defaults, group, options) {}
  // Chunks of one type by their holders: {first, second}. Of several types: by `ptr()`, as Modules.
  template <class Module, class Defaults>
  DistributedOptimizer(std::initializer_list<torch::nn::ModuleHolder<Module>> chunks, const Defaults& defaults,
                       const Group& group, const DistributedOptimizerOptions& options = {})
      : DistributedOptimizer(modules_of(chunks), defaults, group, options) {}
  template <class Module, class Defaults>
  DistributedOptimizer(std::shared_ptr<Module> module, const Defaults& defaults, const Group& group,
                       const DistributedOptimizerOptions& options = {})
      : DistributedOptimizer(Modules{std::move(module)}, defaults, group, options) {}
  template <class Module, class Defaults>
  DistributedOptimizer(const torch::nn::ModuleHolder<Module>& module, const Defaults& defaults, const Group& group,
                       const DistributedOptimizerOptions& options = {})
      : DistributedOptimizer(Modules{module.ptr()}, defaults, group, options) {}
  template <detail::BareModule Bare, class... Rest>
  explicit DistributedOptimizer(Bare&& module, Rest&&... rest)
      : DistributedOptimizer(detail::refuse_bare_module<Bare>(module), std::forward<Rest>(rest)...) {}

 private:
  template <class Module>
  static Modules modules_of(std::initializer_list<torch::nn::ModuleHolder<Module>> chunks) {
    Modules modules;
    for (const auto& chunk : chunks) modules.push_back(chunk.ptr());
    return modules;
  }
};

}  // namespace shoal
