#pragma once
// DistributedDataParallel: data parallelism with a full replica of the model on every rank. Gradients are averaged in
// buckets while backward is still running. Method: Li et al., "PyTorch Distributed: Experiences on Accelerating Data
// Parallel Training" (VLDB 2020).

#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "shoal/detail/data_parallel.h"
#include "shoal/hooks.h"

namespace shoal {

struct DistributedDataParallelOptions {
  // Behaviour.
  bool broadcast_buffers = true;        // broadcast rank 0's buffers before each synchronising forward, and before
                                        // the first forward of an evaluation after a step
  bool find_unused_parameters = false;  // allow parameters that no rank uses in a step; walks the graph
  bool static_graph = false;            // every step uses the graph of the first; required where a block
                                        // is used several times and recomputed by a backward of its own
  // Accumulate and reduce gradients of 16-bit parameters in float32. grad() is float32 under no_sync() and rounded to
  // the parameter's dtype after the reduction.
  bool grad_reduce_in_fp32 = false;
  std::vector<std::string> ignored{};  // names of parameters and buffers that shoal does not touch
  Precision precision{};               // only `compute` is applied, as autocast in forward; convert the module and
                                       // scale the loss yourself
  std::optional<at::ScalarType> reduce_dtype{};  // float16 or bfloat16: dtype of the all-reduce, converted back to the
                                                 // parameter's dtype; none: the parameter's dtype
  std::shared_ptr<CommunicationHook> communication_hook{};  // replaces the all-reduce of a bucket
  std::shared_ptr<BufferHook> buffer_hook{};                // replaces the broadcast of rank 0's buffers
  BufferHookLocation buffer_hook_location = BufferHookLocation::pre_forward;

  // Performance.
  double bucket_cap_mb = 25;            // MiB of gradients per all-reduce
  double first_bucket_mb = 1;           // MiB of the first bucket; small, so that communication starts early
  bool gradient_as_bucket_view = true;  // grad() is a view of its bucket, which saves a copy of the gradients

  // Throws UsageError with a list of all invalid options.
  void validate() const;
};

class GradientConsumer;

class DistributedDataParallelCore : public DataParallelCore {
 public:
  DistributedDataParallelCore(std::shared_ptr<torch::nn::Module> module, const Group& group,
                              const DistributedDataParallelOptions& options);

 private:
  friend class OptimizerInBackward;
  friend class ElasticAccess;  // src/elastic/access.h
  // UsageError, which names `caller`, unless the optimizer holds exactly the trainable parameters.
  void check_optimizer(const torch::optim::Optimizer& optimizer, const std::string& caller) const;
  // Passes averaged gradients to the consumer, then frees them. Throws UsageError after the first step. Collective.
  void use_up_gradients(const std::shared_ptr<GradientConsumer>& consumer);
  void require_regroupable() const;
  void regroup(const Group& group, int64_t step, bool moved);
};

// Wrapper for data-parallel training, after torch.nn.parallel.DistributedDataParallel. Works with any optimizer, which
// may be constructed before or after it.
//
//   auto model = std::make_shared<Net>();
//   shoal::DistributedDataParallel parallel(model, world.group());
//   torch::optim::AdamW optimizer(model->parameters());
//   ...
//   auto loss = cross_entropy(parallel.forward(x), y);
//   loss.backward();      // returns when grad() of every parameter is the mean over ranks
//   optimizer.step();
//   optimizer.zero_grad();
//
// Constructor: collective. Compares names, shapes, dtypes and order of parameters and buffers over all ranks, then
// broadcasts rank 0's values. Throws UsageError for invalid options or a model without trainable parameters,
// DisagreeError if the ranks hold different models.
//
// Parameters may later be loaded, replaced (torch::load, set_data), converted (Module::to), frozen and unfrozen, if all
// ranks do the same. The next training forward compares them once (DisagreeError names the parameter) and rebuilds the
// buckets if necessary. Values written in place are not compared: write the same on all ranks.
//
// Calling forward of the module itself, past the wrapper, also trains, but without broadcast of buffers,
// find_unused_parameters and static_graph.
template <class Module>
class DistributedDataParallel : public detail::DataParallelWrapper<Module, DistributedDataParallelCore> {
 public:
  using Options = DistributedDataParallelOptions;

  DistributedDataParallel(std::shared_ptr<Module> module, const Group& group, const Options& options = {})
      : detail::DataParallelWrapper<Module, DistributedDataParallelCore>(std::move(module), group, options) {}
  DistributedDataParallel(const torch::nn::ModuleHolder<Module>& module, const Group& group,
                          const Options& options = {})
      : DistributedDataParallel(module.ptr(), group, options) {}
  template <detail::BareModule Bare, class... Rest>
  explicit DistributedDataParallel(Bare&& module, Rest&&... rest)
      : DistributedDataParallel(detail::refuse_bare_module<Bare>(module), std::forward<Rest>(rest)...) {}
};

// Deduction guide for holders made by TORCH_MODULE: shoal::DistributedDataParallel parallel(model, group).
template <class Module>
DistributedDataParallel(const torch::nn::ModuleHolder<Module>&, const Group&,
                        const DistributedDataParallelOptions& = {}) -> DistributedDataParallel<Module>;
template <detail::BareModule Bare, class... Rest>
DistributedDataParallel(Bare&&, Rest&&...) -> DistributedDataParallel<std::remove_cvref_t<Bare>>;

}  // namespace shoal
