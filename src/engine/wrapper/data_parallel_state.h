#pragma once
// State of a wrapper.

#include "engine/reducer/reducer.h"
#include "engine/wrapper/buffer_sync.h"
#include "engine/wrapper/parameter_watch.h"
#include "module/known_module.h"
#include "module/walk.h"
#include "shoal/detail/data_parallel.h"

namespace shoal {

struct DataParallelCore::State {
  std::string name;  // of the wrapper's class
  std::shared_ptr<torch::nn::Module> module;
  Group group;
  BufferSync buffers{};
  bool adopts_buffers = true;  // after a Join, those of a rank that took part in the last step
  Precision precision{};
  ModuleTensors tensors;
  KnownModule known{};
  ParameterWatch watch{};  // of the parameters, since they were wrapped or last seen
  std::shared_ptr<Reducer> reducer{};
  std::function<void(const std::shared_ptr<GradientConsumer>&)> remake_reducer{};  // where a strategy has a way to
  std::shared_ptr<GradientConsumer> consumer{};                                    // the present reducer's
  LoggingData::Settings settings{};                                                // for logging
  int no_sync_depth = 0;
  bool entered = false;  // the forward that runs, or ran last, has entered a step that the other ranks wait for

  // Without communication: UsageError when a parameter has another shape by now.
  void require_shapes() const;
  // Replaces the present reducer.
  void make_reducer(std::vector<Gradient> gradients, const ReducerOptions& options, std::unique_ptr<Exchange> exchange);
};

// What averages a wrapper's gradients at present.
Reducer& reducer_of(DataParallelCore& parallel);

enum class Deferred { materialize, keep };

// Walks the module, compares it over the group and, with `sync`, gives everybody rank 0's values. Parameters made in a
// DeferredInit scope get memory, or with `keep` stay as they are, without values. Collective. `name` is the wrapper's,
// for errors: UsageError without module or without trainable parameters.
std::unique_ptr<DataParallelCore::State> wrap(std::shared_ptr<torch::nn::Module> module, const Group& group,
                                              const std::string& name, const std::vector<std::string>& ignored,
                                              bool sync, Deferred deferred = Deferred::materialize);

// UsageError that names a module whose forward communicates by itself (SyncBatchNorm).
void check_forward_is_local(const torch::nn::Module& module);

// The trainable parameters as the reducer sees them.
std::vector<Gradient> gradients_of(const ModuleTensors& tensors);

// Dense gradients of 16-bit parameters accumulate, and are added up, in float32.
void widen(std::vector<Gradient>& gradients);

}  // namespace shoal
