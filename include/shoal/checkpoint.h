#pragma once
// Checkpoints: parameters, buffers, optimizer state, and everything else that is needed to resume training exactly.
// docs/checkpoints.md describes the format, which is the same for every strategy and number of ranks.

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/schedulers/lr_scheduler.h>
#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>

#include <concepts>
#include <filesystem>
#include <memory>
#include <optional>
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

// Access to a strategy's state; the strategies have overloads of their own. It shares ownership of the module; the
// other arguments must outlive it.
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

// State of a training, for checkpoints. One object serves all saves and loads:
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
// Arguments are one of: (DistributedDataParallel, any optimizer that is the same on every rank, or an OSS),
// (ShardedDataParallel, OSS), (DistributedOptimizer), (FullyShardedDataParallel, FullyShardedOptimizer),
// (DecentralizedDataParallel), (LocalUpdates), (FullyShardedDataParallel, ShardGossipOptimizer, group of all ranks of
// all hosts), and (module, optimizer, group) if all ranks hold the same values, for example in a group of one rank.
// They must outlive the object. UsageError for a sharded optimizer among the parts of a whole one, also by a reference
// to its base class. Not collective. Not thread-safe.
//
// It has the state of this optimizer alone. With several OSS under one ShardedDataParallel, or an optimizer each for
// parts of a model, make a TrainingState for each, and save each to a folder of its own.
class TrainingState {
 public:
  template <class... Parts>
  requires(!std::same_as<std::remove_cvref_t<Parts>, TrainingState> && ...) explicit TrainingState(Parts&&... parts)
      : TrainingState(checkpoint_source(detail::without_holder(parts)...)) {}
  explicit TrainingState(std::shared_ptr<CheckpointSource> source);
  // Waits for a background save. Its error is only a warning here: call wait() before.
  ~TrainingState();
  TrainingState(TrainingState&&) noexcept;

  // Adds an object to the state; it must outlive the state. The scaler of the strategy's optimizer is included
  // automatically. Schedules (libtorch's, shoal's and derived classes) must be added in the same order when training
  // resumes. Their step count is restored; other members of a class derived from LRScheduler are not. Construct
  // schedules before load(), on an optimizer with its initial learning rates.
  TrainingState& with(GradScaler& scaler);
  TrainingState& with(torch::optim::LRScheduler& schedule);
  TrainingState& with(torch::optim::ReduceLROnPlateauScheduler& schedule);

  // Waits for a background save and throws its error. One that is cut off by a change of the ranks of an elastic job is
  // only a warning: the next one is made by those that are left. Collective.
  void wait();
  // True while a background save is running. Not collective.
  bool saving() const;

  struct State;
  State& state() { return *state_; }

 private:
  std::unique_ptr<State> state_;
};

struct SaveOptions {
  int64_t step = 0;            // number of the checkpoint; equal on all ranks
  std::string position{};      // position of this rank in its data, in a format of the caller's choice; 2 MiB at most
  int64_t keep_last = 0;       // keep the newest N checkpoints and delete older ones after a save; 0 keeps all
  int64_t snapshot_mb = 4096;  // save_async: MiB of memory per rank for copies; what exceeds it is written before the
                               // call returns

  // Throws UsageError that lists all faults.
  void validate() const;
};

// Saves to RUN/step-N. All ranks must see the folder, and training must be between steps. Each rank writes only what it
// owns; replicated tensors are distributed over the ranks. The checkpoint appears atomically and is on disk when it
// does; then `latest` is updated to its name. A file or folder of that name that is no checkpoint is not replaced:
// CheckpointError. Parameters with float32 main copies are saved in float32. Collective.
// Throws on every rank: CheckpointError for file errors (training can continue), UsageError, DisagreeError if the ranks
// pass different steps, or hold different values of parameters or optimizer state that must be equal, CommError.
void save(const std::filesystem::path& run, TrainingState& training, const SaveOptions& options = {});
// Saves in the background: returns after one pass that copies the values; a thread writes them. Waits for the previous
// save first, and throws its error without starting the new save. File errors, also for the folder, are reported in
// this way.
void save_async(const std::filesystem::path& run, TrainingState& training, const SaveOptions& options = {});

struct LoadOptions {
  bool partial = false;     // load only the parameters and buffers that the checkpoint has, and nothing else: for
                            // fine-tuning. The others keep their values
  bool model_only = false;  // load all parameters and buffers, and nothing else
  bool rates = true;        // load learning rates, unless a schedule sets them
  bool options = true;      // load the other options of param groups: momentum, betas, weight_decay, ...
  bool verify = true;       // verify checksums of the data that is read; several ranks those of a whole .pt file
};

// Result of a load.
struct Loaded {
  std::filesystem::path path;
  int64_t step = 0;
  std::string strategy;    // strategy that wrote the checkpoint
  int ranks = 1;           // number of ranks that wrote it
  bool exact = false;      // same strategy and number of ranks, and no differences: training continues as if it had not
                           // been interrupted
  std::string position{};  // position that this rank passed to save(); with another number of ranks, that of rank 0
  // Differences in options of param groups, schedules and scaler between the checkpoint and the training, and
  // parameters that were not trained there, whose optimizer state begins anew; one sentence each.
  std::vector<std::string> differences{};
};

// Loads a checkpoint of any strategy and number of ranks. `path`: the folder of a run (its latest checkpoint), a
// checkpoint, a safetensors file, a Hugging Face folder, or a .pt file of Python's torch.save. Of a .pt file only
// tensors are read: those of a state_dict under their names, those of dictionaries and lists in it as
// "model.fc.weight"; no code runs. Each rank reads what it owns. A tied tensor may have any of its names there, or
// several if the values are equal. Floating-point values are converted to the dtype of their destination. Param groups
// get the options that their parameters had, even if the groups were different; exceptions, and options that
// LoadOptions exclude, are listed in `differences` (with a warning, unless they were excluded). The state of random
// number generators, and buffers that differ between ranks, are restored if the number of ranks is the same; otherwise
// buffers are rank 0's, and the generators are unchanged. So are parameters that a wrapper ignores, and frozen ones
// that differ between ranks (docs/checkpoints.md). Gradients stay; where ranks hold shards, those from before the load
// have to be dropped with zero_grad(). Collective.
//
// Throws on every rank: UsageError, which names the tensors, for tensors that are missing, unexpected or of another
// shape, and for the state of another optimizer; nothing has changed then. CheckpointError for file errors. If a
// damaged file is detected while parameters are being read, parameters are partly loaded: load another checkpoint.
Loaded load(const std::filesystem::path& path, TrainingState& training, const LoadOptions& options = {});
// Loads the latest checkpoint of a run, if it has one: for programs that are started again until they are done. Without
// one (no folder, or none saved yet) nothing changes. Rank 0 decides, so that all ranks agree. Otherwise as load().
std::optional<Loaded> load_latest(const std::filesystem::path& run, TrainingState& training,
                                  const LoadOptions& options = {});

struct LoadModuleOptions {
  bool partial = false;  // load only the parameters and buffers that the checkpoint has; the others keep their values
                         // and are listed in `differences`, as are tensors that the module does not have
  std::string prefix{};  // prefix of names in the checkpoint that the module's names lack: "chunk0.", "encoder."; other
                         // names are not read
  bool verify = true;    // verify checksums of the data that is read
};

// Loads parameters and buffers into a module without wrapper, optimizer or group, for evaluation of a model trained
// with any strategy and number of ranks. In place; values are converted to the dtypes of the module. Every calling
// process reads the full checkpoint. For a module with a wrapper, use load() with model_only instead. `path` and
// exceptions as for load(). Not collective.
Loaded load_module(const std::filesystem::path& path, torch::nn::Module& module, const LoadModuleOptions& options = {});
template <class Module>
Loaded load_module(const std::filesystem::path& path, const torch::nn::ModuleHolder<Module>& module,
                   const LoadModuleOptions& options = {}) {
  return load_module(path, *module.ptr(), options);
}

// Saves a module's parameters and buffers to one file for other programs, by the file's extension:
//
//   .safetensors  for transformers and others that read this format; a tied tensor is saved once, under its first name
//   .pt           a state_dict: model.load_state_dict(torch.load("model.pt")) in Python; a tied tensor under all names
//
// Values keep their dtypes; tensors are row-major. The file appears under its name when it is complete; a symbolic
// link stays, and its target is written. Makes the folder. load() and load_module() read it, under any strategy.
// Parameters must be whole on this rank: where ranks hold shards, use TrainingCore::save_module() or a
// summon_full_params() scope, or call unwrap() before. Throws UsageError for another extension and for a dtype that the
// format does not have, CheckpointError for file errors. Not collective: one rank calls it.
void save_module(const std::filesystem::path& file, const torch::nn::Module& module);
template <class Module>
void save_module(const std::filesystem::path& file, const torch::nn::ModuleHolder<Module>& module) {
  save_module(file, *module.ptr());
}

}  // namespace shoal
