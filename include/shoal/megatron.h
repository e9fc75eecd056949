#pragma once
// DistributedOptimizer: gradients of a model lie in contiguous buffers; each rank sums up, updates and hands out an
// equal range of each, whatever parameters it cuts (after Megatron-LM's DistributedOptimizer; Rajbhandari et al., SC
// 2020).

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/optimizer.h>

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
  bool overlap_grad_reduce = true;    // sums leave during backward; off: in reduce_model_grads(), which step() calls
  bool overlap_param_gather = false;  // step() does not wait for the other ranks' ranges: an operator that first takes
                                      // a parameter of a bucket does. Reading data_ptr() before that sees old values
  bool reuse_grad_buf_for_param_gather = false;  // parameters keep memory of their own and are copied from their
                                                 // gradients' buffer, where updated ranges are gathered in place; so a
                                                 // step that updates ends what main_grad() shows: a second one is a
                                                 // UsageError until zero_grad(). Off: parameters move
                                                 // to a buffer, once per host, and nothing is copied. For element-wise
                                                 // optimizers
  bool grad_reduce_in_fp32 = false;           // gradients of 16-bit parameters accumulate, and are added up, in float32
  double clip_grad = 0;                       // largest norm of all gradients together; 0: no clipping
  bool log_num_zeros_in_grad = false;         // count the gradients' elements that are zero
  std::optional<GradScalerOptions> scaler{};  // needed where a parameter is float16, and then for all gradients;
                                              // possible for bfloat16 with dynamic = false
  std::vector<std::string> ignored{};  // names of parameters and buffers that shoal leaves alone; of several chunks, in
                                       // every one that has the name, or in one: "chunk1.fc.weight"
  std::optional<Group> model_parallel_group{};  // the ranks that hold one replica of the model together (pipeline
                                                // stages, tensor-parallel ranks), this one among them: all of them
                                                // clip by one norm, skip for one's inf and have one loss scale. All
                                                // ranks of all replicas mean the same. Every step() is theirs, too
  std::shared_ptr<CommunicationHook> communication_hook{};  // sums up gradients instead of a reduce-scatter
  std::shared_ptr<Timers> timers{};                         // measure the parts of a step; none: no cost

  // Performance.
  int64_t bucket_size = 40'000'000;  // elements of gradients in one reduce-scatter, with overlap_grad_reduce

  // Throws UsageError that lists all faults.
  void validate() const;
};

using DistributedStep = ShardedStep;

// Where a piece of a parameter lies that a rank owns; elements.
struct ParameterRange {
  std::string name;
  size_t chunk = 0;   // number of the model chunk
  size_t buffer = 0;  // number of the gradient buffer within the chunk
  Range world;        // within the buffer
  Range local;        // within the rank's view of the buffer
  Range parameter;    // within the parameter, in the order in which its elements lie in memory
};

class CheckpointSource;

// What DistributedOptimizer does, whatever the optimizer. Use DistributedOptimizer.
class DistributedOptimizerCore : public ShardedOptimizerCore, public Joinable {
 public:
  using Modules = std::vector<std::shared_ptr<torch::nn::Module>>;

  DistributedOptimizerCore(const Modules& chunks, ParamGroups groups,
                           std::unique_ptr<torch::optim::OptimizerOptions> defaults, const Factory& make, bool cut,
                           const Group& group, const DistributedOptimizerOptions& options);
  ~DistributedOptimizerCore() override;

  // Backward of a loss that is a sum over `weight` samples or tokens; see DataParallelWrapper::backward. UsageError
  // with several chunks: weight the loss there.
  void backward(const at::Tensor& loss_sum, double weight);
  // Scope in which backward only accumulates into the gradient buffers.
  [[nodiscard]] NoSync no_sync(bool accumulate = true);
  // This rank's part of a step for which it has no batch, in a Join scope. Does nothing where backward does not sum up;
  // step() is for every rank in any case. Collective.
  void shadow() override;
  void check_shadow() const override;
  void settle() override;
  void attend(const std::optional<Attendance>& attendance) override;
  void adopt_model(int rank) override;
  // Sums up what backwards have accumulated: first over the groups declared with all_reduce_grads(), then divided by
  // the number of ranks and scattered. For overlap_grad_reduce = false; UsageError otherwise. Collective.
  void reduce_model_grads();
  // Waits for the parameters that other ranks have updated in the last step (overlap_param_gather). Operators do so by
  // themselves; torch::save(module) and data_ptr() read past them, and are refused before. Not collective.
  void finish_param_sync();
  // Gradients of these parameters are summed over `group` (pipeline stages that share an embedding, ranks that share a
  // sequence) before anything else, zeros for ranks that did not use them; norms and counts take them from the group's
  // lowest rank. `name`, such as "embedding", is the reduction's in timers and logs. Collective over `group`.
  // UsageError with overlap_grad_reduce, for tensors that are none of this optimizer's parameters or that the group
  // sums already, and where clip_grad, scaler or log_num_zeros_in_grad would differ on the group's ranks: they must be
  // in model_parallel_group. DisagreeError when the group's ranks declare other shapes.
  void all_reduce_grads(const std::vector<at::Tensor>& parameters, const Group& group,
                        const std::string& name = "declared");
  // All ranks of `group` hold these parameters and compute the same gradients (tensor-parallel ranks' layer norms):
  // norms and counts take them from its lowest rank. UsageError for other tensors and where model_parallel_group does
  // not have the group's ranks.
  void count_once(const std::vector<at::Tensor>& parameters, const Group& group);

  // This rank cannot finish a step that its peers have begun or will begin; they get StepAbandoned from their backward.
  // Collective with their step.
  void abandon_step();

  // The parameter's place in the gradient buffer. Before a reduction it holds what this rank's own backwards have left,
  // and may be changed; after it only this rank's range is valid, after zero_grad() nothing until the next gradient
  // comes. Undefined where another rank owns the whole parameter and no gradient waits for it.
  at::Tensor main_grad(const at::Tensor& parameter) const;
  // Pieces that a rank of the group (default: this one) owns, in buffer order.
  std::vector<ParameterRange> param_range_map(std::optional<int> rank = std::nullopt) const;
  const Group& group() const override { return ShardedOptimizerCore::group(); }
  // What this rank knows of the optimizer and its steps; chunks and their times add up. Not collective; between steps.
  LoggingData logging_data() const;

 private:
  friend std::shared_ptr<CheckpointSource> checkpoint_source(DistributedOptimizerCore& optimizer);
  static std::unique_ptr<State> make_state(const Modules& chunks, bool cut, const Group& group,
                                           const DistributedOptimizerOptions& options);
  void connect_chunks();
  void complete_gradients() override;
  void end_gradients() override;

  struct Reduction;
  std::unique_ptr<Reduction> reduction_;
};

// For TrainingState.
std::shared_ptr<CheckpointSource> checkpoint_source(DistributedOptimizerCore& optimizer);

// Wraps any libtorch optimizer. An element-wise one (optim/element_wise.h) updates cut parameters; for others each
// parameter is owned whole by one rank.
//
//   shoal::DistributedOptimizer<shoal::FusedAdamW> optimizer(model, torch::optim::AdamWOptions(1e-3), world.group());
//   ...
//   cross_entropy(model->forward(x), y).backward();
//   optimizer.step();
//   optimizer.zero_grad();
//
// The module needs no wrapper. Its trainable parameters move to one buffer per dtype (once per host where ranks share
// memory; or stay, see reuse_grad_buf_for_param_gather), their gradients to another; after
// backward the sums lie in the buffers, and grad() is a tensor without memory: zero_grad() in every form drops or
// zeroes the sum, reading it is a UsageError that names the call to use (see ShardedOptimizerCore::step). So it is
// before the reduction, too (no_sync(), overlap_grad_reduce = false): main_grad() holds this rank's own then. For
// parameters of 16 bits each rank keeps a float32 main copy of its own ranges, and the optimizer's state is float32.
// Batch-norm buffers stay each rank's own.
//
// Parameters may be loaded, replaced or written at any time (see OSS): the next step() takes the values over, into the
// main copies too; gradients that are there are applied to them. UsageError from step(), which then has done nothing,
// for a parameter of another dtype (Module::to) and for one that was frozen and requires a gradient now: turn it back,
// or make the optimizer anew.
//
// Constructor: collective; gives everybody rank 0's values. UsageError for a dtype other than float16, bfloat16,
// float32 (float64 counts as float32 does), for float16 without scaler or a scaler where all is float32, for a
// parameter in two chunks, for wrong options; DisagreeError when ranks hold different models or options.
//
// Several chunks: their gradients are summed up one chunk after the other, the last one first, on every rank, whatever
// chunks a rank runs; a chunk that it does not run adds nothing. Sums of a chunk leave during its own backward; where
// one backward passes through several, those of the last chunk do, and the others' at its end.
//
// Timers: at level 0 "optimizer" (a step()); at level 1 "declared-grads-all-reduce" (or another name, see
// all_reduce_grads), "grads-reduce-scatter" (with overlap_grad_reduce: what backward does not hide of it),
// "params-all-gather" (with overlap_param_gather: what the next forward does not hide of it, once per bucket); at level
// 2 "optimizer-unscale-and-check-inf", "optimizer-clip-main-grad", "optimizer-inner-step". What overlaps has no
// barrier.
template <class Local>
class DistributedOptimizer : public DistributedOptimizerCore {
 public:
  // Several modules are chunks of one model (virtual pipeline stages) under one optimizer.
  template <class Defaults>
  DistributedOptimizer(const Modules& chunks, ParamGroups groups, const Defaults& defaults, const Group& group,
                       const DistributedOptimizerOptions& options = {})
      : DistributedOptimizerCore(chunks, std::move(groups), detail::default_options<Local>(defaults),
                                 detail::local_optimizer_maker<Local>(defaults), element_wise<Local>, group, options) {}
  // One param group of all trainable parameters.
  template <class Defaults>
  DistributedOptimizer(const Modules& chunks, const Defaults& defaults, const Group& group,
                       const DistributedOptimizerOptions& options = {})
      : DistributedOptimizer(chunks, ParamGroups(), defaults, group, options) {}
  template <class Module, class Defaults>
  DistributedOptimizer(std::shared_ptr<Module> module, const Defaults& defaults, const Group& group,
                       const DistributedOptimizerOptions& options = {})
      : DistributedOptimizer(Modules{std::move(module)}, defaults, group, options) {}
  template <class Module, class Defaults>
  DistributedOptimizer(const torch::nn::ModuleHolder<Module>& module, const Defaults& defaults, const Group& group,
                       const DistributedOptimizerOptions& options = {})
      : DistributedOptimizer(Modules{module.ptr()}, defaults, group, options) {}
};

}  // namespace shoal
