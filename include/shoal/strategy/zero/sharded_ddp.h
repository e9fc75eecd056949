#pragma once
// ShardedDataParallel: each gradient goes only to the rank that owns its parameter (ZeRO-2; Rajbhandari et al., SC
// 2020; after fairscale's ShardedDataParallel).

#include <memory>

#include "shoal/engine/buffer_hook.h"
#include "shoal/engine/communication_hook.h"
#include "shoal/engine/data_parallel.h"
#include "shoal/strategy/zero/oss.h"

namespace shoal {

struct Gradient;

struct ShardedDataParallelOptions {
  // Behaviour.
  bool broadcast_buffers = true;        // rank 0's buffers reach all ranks before each synchronising forward
  bool sync_models_at_startup = true;   // rank 0's parameters and buffers reach all ranks in the constructor; without it
                                        // buffers and frozen parameters stay each rank's own (trainable ones have
                                        // rank 0's values since OSS was made)
  bool auto_refresh_trainable = true;   // a change of requires_grad, dtype or device is adopted by the next forward,
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
  void refresh_trainable();
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

  // After requires_grad, dtype or device of parameters has changed: the optimizers' refresh_trainable(), then buckets
  // of what they share. Forward calls it by itself unless auto_refresh_trainable is off; then a forward after such a
  // change is refused until it has been called (UsageError names the parameter). Collective.
  void refresh_trainable() { this->core_.refresh_trainable(); }

  // Sums up what lies in grad() and has not been summed up yet, without a backward: what backwards under no_sync have
  // left, gradients that were set by hand. A rank without any contributes nothing; sums of earlier steps stay and are
  // added to. Counts as a step, within no_sync, too. Collective; UsageError within a backward.
  void reduce() { this->core_.reduce(); }
};

template <class Module>
ShardedDataParallel(const torch::nn::ModuleHolder<Module>&, OSSCore&, const Group&,
                    const ShardedDataParallelOptions& = {}) -> ShardedDataParallel<Module>;
template <class Module>
ShardedDataParallel(const torch::nn::ModuleHolder<Module>&, std::vector<OSSCore*>, const Group&,
                    const ShardedDataParallelOptions& = {}) -> ShardedDataParallel<Module>;

}  // namespace shoal
