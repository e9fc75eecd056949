#pragma once
// DistributedDataParallel: every rank holds the whole model; gradients are averaged while backward still runs.
// After Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (VLDB 2020).

#include <torch/optim/optimizer.h>

#include <memory>
#include <optional>

#include "shoal/detail/data_parallel.h"
#include "shoal/hooks.h"

namespace shoal {

struct DistributedDataParallelOptions {
  // Behaviour.
  bool broadcast_buffers = true;        // rank 0's buffers reach all ranks before each synchronising forward
  bool find_unused_parameters = false;  // accept parameters that no rank uses in a step; costs a walk of the graph
  bool static_graph = false;            // every step is like the first; needed when a block is recomputed in backward
  bool grad_reduce_in_fp32 = false;     // gradients of 16-bit parameters accumulate, and are added up, in float32, in
                                        // which grad() is under no_sync(); then it is rounded to the parameter's dtype
  std::vector<std::string> ignored{};   // names of parameters and buffers that shoal leaves alone
  Precision precision{};                // forward computes as `compute` says; converting and scaling are the caller's
  std::optional<at::ScalarType>
      reduce_dtype{};  // float16 or bfloat16: gradients are summed up in this, and come back in
                       // the parameters' dtype; none: in that itself
  std::shared_ptr<CommunicationHook> communication_hook{};  // sums up gradients instead of an all-reduce
  std::shared_ptr<BufferHook> buffer_hook{};                // makes buffers equal instead of rank 0's broadcast
  BufferHookLocation buffer_hook_location = BufferHookLocation::pre_forward;

  // Performance.
  double bucket_cap_mb = 25;            // MiB of gradients in one all-reduce
  double first_bucket_mb = 1;           // MiB of the first one, so that communication starts early
  bool gradient_as_bucket_view = true;  // grad() lies in the bucket: no second copy of the gradients

  // Throws UsageError that lists all faults.
  void validate() const;
};

class GradientConsumer;

class DistributedDataParallelCore : public DataParallelCore {
 public:
  DistributedDataParallelCore(std::shared_ptr<torch::nn::Module> module, const Group& group,
                              const DistributedDataParallelOptions& options);

  // For OptimizerInBackward. UsageError unless the optimizer has all parameters that are trained here and no others.
  void check_optimizer(const torch::optim::Optimizer& optimizer) const;
  // Means go to the consumer, and then their memory. UsageError after the first step. Collective.
  void use_up_gradients(const std::shared_ptr<GradientConsumer>& consumer);
};

// Any optimizer may be built on the module's parameters, before or after.
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
// The constructor is collective (compares names, shapes, dtypes and order of parameters and buffers, then sends rank
// 0's values). Throws UsageError for wrong options or a model without trainable parameters, DisagreeError when ranks
// hold different models.
//
// Parameters may be loaded, replaced (torch::load, set_data), converted (Module::to), frozen and unfrozen later, on all
// ranks alike: the next forward that trains compares them, once (DisagreeError, which names the parameter), and makes
// buckets anew if it must. Values that are written in place are not compared: write the same on all ranks.
//
// A forward of the module itself, past the wrapper, trains too, but without broadcast of
// buffers, without find_unused_parameters and static_graph.
template <class Module>
class DistributedDataParallel : public DataParallelWrapper<Module, DistributedDataParallelCore> {
 public:
  using Options = DistributedDataParallelOptions;

  DistributedDataParallel(std::shared_ptr<Module> module, const Group& group, const Options& options = {})
      : DataParallelWrapper<Module, DistributedDataParallelCore>(std::move(module), group, options) {}
  DistributedDataParallel(const torch::nn::ModuleHolder<Module>& module, const Group& group,
                          const Options& options = {})
      : DistributedDataParallel(module.ptr(), group, options) {}
  template <detail::BareModule Bare, class... Rest>
  explicit DistributedDataParallel(Bare&& module, Rest&&... rest)
      : DistributedDataParallel(detail::refuse_bare_module<Bare>(module), std::forward<Rest>(rest)...) {}
};

// shoal::DistributedDataParallel parallel(model, group) with a holder made by TORCH_MODULE.
template <class Module>
DistributedDataParallel(const torch::nn::ModuleHolder<Module>&, const Group&,
                        const DistributedDataParallelOptions& = {}) -> DistributedDataParallel<Module>;
template <detail::BareModule Bare, class... Rest>
DistributedDataParallel(Bare&&, Rest&&...) -> DistributedDataParallel<std::remove_cvref_t<Bare>>;

}  // namespace shoal
