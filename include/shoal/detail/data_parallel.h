#pragma once
// Base class of DistributedDataParallel, ShardedDataParallel and FullyShardedDataParallel: a forward that prepares a
// step, a backward that synchronises.

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <concepts>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "shoal/forward_tensors.h"
#include "shoal/group.h"
#include "shoal/join.h"
#include "shoal/precision.h"
#include "shoal/telemetry.h"

namespace shoal {

class Reducer;
struct ModuleTensors;

// Scope in which backward only accumulates gradients on this rank; the first backward after the scope reduces them.
// Move-only. Must not outlive its wrapper.
class NoSync {
 public:
  // Counts nested scopes in `depth`; nullptr makes a scope without effect.
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

// Type-independent part of a wrapper, created by the strategies. Shares ownership of the module; the group's transport
// lives at least as long as the wrapper. The destructor removes the hooks and does not communicate. Not thread-safe:
// one thread trains.
class DataParallelCore : public Joinable {
 public:
  struct State;
  explicit DataParallelCore(std::unique_ptr<State> state);
  ~DataParallelCore() override;

  // Backward of a loss that is a sum over `weight` samples or tokens. Gradients become the sum divided by the total
  // weight of all ranks and all micro-batches of the step, including those under no_sync. weight >= 0 and finite; 0:
  // this rank has no samples in this step. In one step, all ranks call either only this function or only
  // loss.backward(). It is added to what earlier steps have left in the gradients. Under DistributedDataParallel,
  // what the program has written to these since counts as a gradient of this rank. If the loss goes through the modules
  // of several wrappers, call it on one of them: the weight is that of all.
  void backward(const at::Tensor& loss_sum, double weight);

  // Scope in which backward accumulates without communication. If `accumulate` is false it has no effect, so a loop
  // over micro-batches can say
  //   const auto scope = parallel.no_sync(micro + 1 < micros);
  [[nodiscard]] NoSync no_sync(bool accumulate = true);

  // Ends the step on this rank after an exception (in forward, the loss, backward or a hook), or to skip the batch.
  // Does nothing between steps. Call zero_grad() afterwards.
  // - If forward had begun the step, also under no_sync(), the other ranks get StepAbandoned from the backward that
  //   ends it, and gradients are invalid on all ranks: zero, or undefined if they were so before. Sharded sums of
  //   earlier steps stay.
  // - The next forward of any wrapper that averages gradients, in the same thread, calls it after an exception in
  //   forward, in a hook, or in a backward that had reached an output of forward, but not under no_sync(), where the
  //   program may leave out a micro-batch. After other exceptions call it yourself: a rank that goes on without it
  //   meets the others one step late (docs/guides/ddp.md).
  // - In a Join it also ends a step for which this rank has said that it has a batch, which cannot be made.
  // - If the ranks have agreed to skip a step that some of them have not begun, do not call it (there it would do
  //   nothing, and the others would wait): zero the gradients.
  void abandon_step();

  // Communication of a step for which this rank has no batch, in a Join scope: matches the collectives of forward and
  // backward on the other ranks. Does nothing under no_sync. Collective.
  void shadow() override;

  // Names of the parameters of each bucket, in the order in which buckets are reduced.
  std::vector<std::vector<std::string>> buckets() const;
  // Number of synchronising steps so far, including abandoned ones.
  [[nodiscard]] int64_t steps() const;
  // Options and statistics of the wrapper on this rank. Call it between steps. Not collective.
  LoggingData logging_data() const;

  const std::shared_ptr<torch::nn::Module>& module() const;
  const Group& group() const override;
  // A scope of this wrapper that has not ended, "no_sync()"; empty: none.
  virtual std::string open_scope() const;

 protected:
  // Called around the module's forward.
  void before_forward();
  void after_forward(const std::vector<at::Tensor>& outputs);
  void forward_failed();
  const Precision& precision() const;
  at::DeviceType device() const;

  // Called before each forward (under no_sync only if nothing must be compared over ranks): detects parameters that the
  // user has replaced since the last one.
  virtual void adopt_changes(bool training);
  // Called around each forward. training: the forward builds a graph.
  virtual void begin_forward(bool /*training*/) {}
  virtual void end_forward(bool /*training*/) {}
  // Called before each forward that builds a graph.
  virtual void prepare() {}
  State& state() { return *state_; }
  const State& state() const { return *state_; }

 private:
  friend Reducer& reducer_of(DataParallelCore& parallel);  // for checkpoints and Elastic
  friend const ModuleTensors& tensors_of(DataParallelCore& parallel);
  friend bool was_synchronized(DataParallelCore& parallel);
  friend void set_share(DataParallelCore& parallel, std::optional<double> share);
  friend class ElasticAccess;  // src/elastic/access.h
  void before_backward(std::function<void()> listener);
  // For Join.
  void check_shadow() const override;
  void settle() override;
  void set_join_state(const std::optional<JoinState>& join_state) override;
  void broadcast_model(int rank) override;

  std::unique_ptr<State> state_;
};

namespace detail {

// A forward between before() and after(tensors of its result); failed() if any of them throws. Returns the result, if
// any.
template <class Before, class Forward, class After, class Failed>
auto forward_between(Before&& before, Forward&& forward, After&& after, Failed&& failed) {
  try {
    before();
    std::vector<at::Tensor> tensors;
    if constexpr (std::is_void_v<decltype(forward())>) {
      forward();
      after(tensors);
    } else {
      auto output = forward();
      collect_tensors(output, tensors);
      after(tensors);
      return output;
    }
  } catch (...) {
    failed();
    throw;
  }
}

// Wrapper of a module: its core together with the typed module. Parameters remain the module's own tensors.
template <class Module, class Core>
class DataParallelWrapper : public Core {
 public:
  // Runs the module's forward and returns its result, if any. Collective if buffers are broadcast; not under no_sync or
  // if gradients are disabled. An exception outside no_sync marks the step as failed on this rank, see abandon_step().
  template <class... Arguments>
  auto forward(Arguments&&... arguments) {
    return detail::forward_between([this] { this->before_forward(); },
                                   [&] {
                                     const Precision::Scope scope(this->precision(), this->device());
                                     return module_->forward(std::forward<Arguments>(arguments)...);
                                   },
                                   [this](const std::vector<at::Tensor>& tensors) { this->after_forward(tensors); },
                                   [this] { this->forward_failed(); });
  }

  // The same as forward().
  template <class... Arguments>
  auto operator()(Arguments&&... arguments) {
    return forward(std::forward<Arguments>(arguments)...);
  }

  const std::shared_ptr<Module>& module() const { return module_; }
  Module* operator->() const { return module_.get(); }

 protected:
  template <class... CoreArguments>
  explicit DataParallelWrapper(std::shared_ptr<Module> module, CoreArguments&&... arguments)
      : Core(module, std::forward<CoreArguments>(arguments)...), module_(std::move(module)) {}

 private:
  std::shared_ptr<Module> module_;
};

// A module itself, where a std::shared_ptr or a holder of one is needed.
template <class T>
concept BareModule = std::derived_from<std::remove_cvref_t<T>, torch::nn::Module>;

// Never returns anything: it is there for its sentence.
template <BareModule Bare>
std::shared_ptr<std::remove_cvref_t<Bare>> refuse_bare_module(Bare&& /*module*/) {
  static_assert(!BareModule<Bare>,
                "shoal: a wrapper shares ownership of its module. Make the module by std::make_shared<Net>(...), or as "
                "the holder that TORCH_MODULE defines, and pass that.");
  return nullptr;
}

}  // namespace detail

}  // namespace shoal
