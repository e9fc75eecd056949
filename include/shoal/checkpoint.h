#pragma once
// Saving and loading a training: parameters, buffers, optimizer state, and what else it takes to go on exactly.
// docs/checkpoints.md has the format, which is the same for every strategy and number of ranks.

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/schedulers/lr_scheduler.h>
#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>

#include <concepts>
#include <filesystem>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "shoal/detail/data_parallel.h"
#include "shoal/error.h"
#include "shoal/group.h"
#include "shoal/precision.h"
#include "shoal/schedules.h"

namespace shoal {

// How a strategy's state is found; the strategies have overloads of their own. Kept alive: the module. The others must
// outlive it.
class CheckpointSource;
std::shared_ptr<CheckpointSource> checkpoint_source(std::shared_ptr<torch::nn::Module> module,
                                                    torch::optim::Optimizer& optimizer, const Group& group);
std::shared_ptr<CheckpointSource> checkpoint_source(DataParallelCore& parallel, torch::optim::Optimizer& optimizer);

namespace detail {

// The pointer in a module's holder; anything else as it is.
template <class Part>
decltype(auto) without_holder(Part& part) {
  if constexpr (requires { part.ptr(); }) {
    return part.ptr();
  } else {
    return (part);
  }
}

}  // namespace detail

// A training as checkpoints see it. One object serves all saves and loads of it:
//
//   shoal::FullyShardedDataParallel parallel(model, world.group());
//   shoal::FullyShardedOptimizer<shoal::FusedAdamW> optimizer(parallel, torch::optim::AdamWOptions(3e-4));
//   shoal::TrainingState training(parallel, optimizer);
//   shoal::load("runs/a", training);
//   for (...) {
//     ...
//     if (step % 1000 == 0) shoal::save_async("runs/a", training, {.step = step, .keep_last = 3});
//   }
//   training.wait();
//
// Takes (DistributedDataParallel, any optimizer that every rank runs alike or an OSS), (ShardedDataParallel, OSS),
// (DistributedOptimizer), (FullyShardedDataParallel, FullyShardedOptimizer), (DecentralizedDataParallel),
// (LocalUpdates), (FullyShardedDataParallel, ShardGossipOptimizer, group of all ranks of all hosts), and (module,
// optimizer, group) where every rank holds the same, such as a group of one rank. The parts must outlive it. Not
// collective. One thread at a time.
class TrainingState {
 public:
  template <class... Parts>
  requires(!std::same_as<std::remove_cvref_t<Parts>, TrainingState> && ...) explicit TrainingState(Parts&&... parts)
      : TrainingState(checkpoint_source(detail::without_holder(parts)...)) {}
  explicit TrainingState(std::shared_ptr<CheckpointSource> source);
  // Waits for a save in the background; an error of it is lost here, so call wait() before.
  ~TrainingState();
  TrainingState(TrainingState&&) noexcept;

  // Belong to it as well, and must outlive it. A scaler that the strategy's optimizer has is known without. Schedules,
  // libtorch's, shoal's and derived ones, come in the same order when the training goes on; their count of steps is
  // restored, what a class derived from LRScheduler keeps beside it is not. Construct them before load(), on an
  // optimizer with the rates that it had at first.
  TrainingState& with(GradScaler& scaler);
  TrainingState& with(torch::optim::LRScheduler& schedule);
  TrainingState& with(torch::optim::ReduceLROnPlateauScheduler& schedule);

  // Until no save is in the background. Throws its error. Collective.
  void wait();
  // Whether a save is in the background. Not collective.
  bool saving() const;

  struct State;
  State& state() { return *state_; }

 private:
  std::unique_ptr<State> state_;
};

struct SaveOptions {
  int64_t step = 0;            // the checkpoint's number; the same on all ranks
  std::string position{};      // this rank's: where its data goes on, in words of the caller's
  int64_t keep_last = 0;       // older checkpoints than the last so many go after a save; 0: all stay
  int64_t snapshot_mb = 4096;  // save_async: MiB of memory for copies on each rank; what goes beyond is written before
                               // it returns

  // Throws UsageError that lists all faults.
  void validate() const;
};

// Saves to RUN/step-N, which all ranks must see as one folder, between steps. Each rank writes only what it owns, and
// what all have is shared out among them. The checkpoint appears there complete and on disk at once, then `latest`
// names it. Parameters with float32 main copies are saved as these. Collective. Throws on every rank: CheckpointError
// for files (training can go on), UsageError, DisagreeError for other steps, CommError.
void save(const std::filesystem::path& run, TrainingState& training, const SaveOptions& options = {});
// The same, in the background: returns when the values have been copied, by one thread in one pass. Waits for the one
// before and throws its error, without having saved the new one; errors of files, of the folder too, come that way.
void save_async(const std::filesystem::path& run, TrainingState& training, const SaveOptions& options = {});

struct LoadOptions {
  bool partial = false;     // parameters and buffers that are there; others keep their values, and nothing else is
                            // loaded: for fine-tuning
  bool model_only = false;  // all parameters and buffers, and nothing else
  bool rates = true;        // learning rates become those of the checkpoint, unless a schedule sets them
  bool options = true;      // and so do the other options of param groups: momentum, betas, weight_decay, ...
  bool verify = true;       // compare checksums of what is read
};

// What was found.
struct Loaded {
  std::filesystem::path path;
  int64_t step = 0;
  std::string strategy;    // that it was written by
  int ranks = 1;           // that wrote it
  bool exact = false;      // this strategy at this number of ranks, and no differences: training goes on as if it had
                           // never ended
  std::string position{};  // that this rank has given to save(); at another number of ranks: rank 0
  // What of param groups' options, schedules and scaler is not as it was saved, one sentence each.
  std::vector<std::string> differences{};
};

// From a run's folder (its latest checkpoint), a checkpoint, a safetensors file, or a folder of Hugging Face's, written
// by any strategy at any number of ranks. Each rank reads what it owns. Floating-point values are converted to the
// dtype that they have here. Param groups get the options that their parameters had, whichever groups these were in;
// where that cannot be, and where LoadOptions keep them, `differences` says so (and a warning, unless it was asked
// for). Random-number state, and buffers of which ranks have their own, come back at the number of ranks that saved
// them; else buffers are rank 0's, and random numbers go on as they were. Collective.
//
// Throws on every rank: UsageError that names tensors that are missing, that nobody wants, or that have another shape,
// and for another optimizer's state: nothing has changed then; CheckpointError for files. One that is found to be
// damaged while parameters are read leaves them half loaded: load another.
Loaded load(const std::filesystem::path& path, TrainingState& training, const LoadOptions& options = {});

struct LoadModuleOptions {
  bool partial = false;  // parameters and buffers that are there; others keep their values
  std::string prefix{};  // of the names there, which the module's do not have: "chunk0.", "encoder."; what has another
                         // is not read
  bool verify = true;    // compare checksums of what is read
};

// Parameters and buffers alone, into a module without wrapper, optimizer and group: to evaluate what any strategy has
// trained at any number of ranks. In place; values are converted to the dtypes that they have here. Every process that
// calls it reads the whole; not collective. A module that a strategy has wrapped takes load() with model_only instead.
// `path` and errors as for load().
Loaded load_module(const std::filesystem::path& path, torch::nn::Module& module, const LoadModuleOptions& options = {});
template <class Module>
Loaded load_module(const std::filesystem::path& path, const torch::nn::ModuleHolder<Module>& module,
                   const LoadModuleOptions& options = {}) {
  return load_module(path, *module.ptr(), options);
}

}  // namespace shoal
