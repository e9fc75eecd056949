#pragma once
// DistributedDataParallel: every rank holds the whole model; gradients are averaged while backward still runs.
// After Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (VLDB 2020).

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "shoal/comm/group.h"
#include "shoal/engine/outputs.h"

namespace shoal {

struct DistributedDataParallelOptions {
  // Behaviour.
  bool broadcast_buffers = true;        // rank 0's buffers reach all ranks before each synchronising forward
  bool find_unused_parameters = false;  // accept parameters that no rank uses in a step; costs a walk of the graph
  bool static_graph = false;            // every step is like the first; needed when a block is recomputed in backward
  std::vector<std::string> ignored{};   // names of parameters and buffers that shoal leaves alone

  // Performance.
  double bucket_cap_mb = 25;            // MiB of gradients in one all-reduce
  double first_bucket_mb = 1;           // MiB of the first one, so that communication starts early
  bool gradient_as_bucket_view = true;  // grad() lies in the bucket: no second copy of the gradients

  // Throws UsageError that lists all faults.
  void validate() const;
};

// Scope in which backward only accumulates gradients on this rank; the first backward outside sums up and synchronises.
// Ends with the scope, also by an exception. Move-only. Must not outlive its wrapper.
class NoSync {
 public:
  // Counts nested scopes in `depth`; nullptr: a scope without effect.
  explicit NoSync(int* depth) : depth_(depth) {
    if (depth_ != nullptr) ++*depth_;
  }
  NoSync(NoSync&& other) noexcept : depth_(std::exchange(other.depth_, nullptr)) {}
  NoSync& operator=(NoSync&&) = delete;
  ~NoSync() {
    if (depth_ != nullptr) --*depth_;
  }

 private:
  int* depth_;
};

// What DistributedDataParallel does, whatever the module's type. Use DistributedDataParallel.
class DistributedDataParallelCore {
 public:
  DistributedDataParallelCore(std::shared_ptr<torch::nn::Module> module, const Group& group,
                              const DistributedDataParallelOptions& options);
  ~DistributedDataParallelCore();

  void before_forward();
  void after_forward(const std::vector<at::Tensor>& outputs);
  void forward_failed();
  void backward(const at::Tensor& loss_sum, double weight);
  NoSync no_sync(bool accumulate);
  void reset();
  std::vector<std::vector<std::string>> buckets() const;
  int64_t step() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Wraps a module; its parameters stay the module's own tensors, so any optimizer may be built on them, before or after.
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
// Construction and destruction: the constructor is collective (compares names, shapes, dtypes and order of parameters
// and buffers, then sends rank 0's values); the destructor removes the hooks and does not communicate. Throws
// UsageError for wrong options or a model without trainable parameters, DisagreeError when ranks hold different models.
// Not thread-safe: one thread trains. Shares ownership of the module; the group's transport lives as long as the
// wrapper.
template <class Module>
class DistributedDataParallel {
 public:
  using Options = DistributedDataParallelOptions;

  DistributedDataParallel(std::shared_ptr<Module> module, const Group& group, const Options& options = {})
      : module_(std::move(module)), core_(module_, group, options) {}
  DistributedDataParallel(const torch::nn::ModuleHolder<Module>& module, const Group& group,
                          const Options& options = {})
      : DistributedDataParallel(module.ptr(), group, options) {}

  // Returns what the module's own forward returns. Collective when buffers are broadcast (not under no_sync, not when
  // gradients are disabled). An exception marks the step as failed on this rank, see reset().
  // A forward of the module itself, past the wrapper, trains too, but without broadcast of buffers, without
  // find_unused_parameters and static_graph.
  template <class... Arguments>
  auto forward(Arguments&&... arguments) {
    try {
      core_.before_forward();
      auto output = module_->forward(std::forward<Arguments>(arguments)...);
      std::vector<at::Tensor> tensors;
      collect_tensors(output, tensors);
      core_.after_forward(tensors);
      return output;
    } catch (...) {
      core_.forward_failed();
      throw;
    }
  }

  // Backward of a loss that is a sum over `weight` samples or tokens: grad() becomes sum / sum of weights over all
  // ranks and all micro-batches of the step (those under no_sync included). weight >= 0 and finite; 0 says this rank
  // has no sample in this step. Every backward of a step must come through here, or none, on all ranks. Start the step
  // with zeroed gradients.
  void backward(const at::Tensor& loss_sum, double weight) { core_.backward(loss_sum, weight); }

  // `accumulate` false gives a scope without effect, so that a loop over micro-batches reads
  //   const auto scope = parallel.no_sync(micro + 1 < micros);
  [[nodiscard]] NoSync no_sync(bool accumulate = true) { return core_.no_sync(accumulate); }

  // After an exception in forward, backward or a hook on any rank: makes the wrapper ready for the next step. If this
  // rank had entered the step, its peers get StepAbandoned from their backward instead of waiting, and no gradient is
  // valid on any rank. Without a failed step it does nothing. The next forward calls it by itself. Gradients
  // accumulated so far are the caller's to zero.
  void reset() { core_.reset(); }

  // Names of the parameters in each bucket, in the order in which buckets are reduced.
  std::vector<std::vector<std::string>> buckets() const { return core_.buckets(); }
  // Synchronising steps finished or abandoned so far.
  int64_t step() const { return core_.step(); }

  const std::shared_ptr<Module>& module() const { return module_; }
  Module* operator->() const { return module_.get(); }

 private:
  std::shared_ptr<Module> module_;
  DistributedDataParallelCore core_;
};

// shoal::DistributedDataParallel parallel(model, group) with a holder made by TORCH_MODULE.
template <class Module>
DistributedDataParallel(const torch::nn::ModuleHolder<Module>&, const Group&,
                        const DistributedDataParallelOptions& = {}) -> DistributedDataParallel<Module>;

}  // namespace shoal
