#pragma once
// State of a wrapper.

#include "engine/changes/changed_values.h"
#include "engine/changes/parameter_watch.h"
#include "engine/reducer/reducer.h"
#include "engine/wrapper/buffer_sync.h"
#include "engine/wrapper/module_checks.h"
#include "module/known_module.h"
#include "module/walk.h"
#include "shoal/detail/data_parallel.h"

namespace shoal {

struct DataParallelCore::State {
  std::string name;  // class name of the wrapper
  std::shared_ptr<torch::nn::Module> module;
  Group group;
  bool synchronized = true;  // with rank 0's values when it was wrapped
  BufferSync buffers{};
  bool adopts_buffers = true;  // after a Join, all ranks take the buffers of a rank that took part in the last step
  Precision precision{};
  ModuleTensors tensors;
  KnownModule known{};
  ParameterWatch watch{};  // changes of parameters since they were wrapped or last checked
  std::shared_ptr<Reducer> reducer{};
  // Set by strategies that can replace their reducer. frozen: parameters whose gradients it reduces, beside the
  // trainable ones.
  std::function<void(const std::shared_ptr<GradientConsumer>&, const std::vector<NamedTensor>& frozen)>
      remake_reducer{};
  std::optional<int64_t> left_over{};  // the step that reduces what micro-batches had left of frozen parameters
  struct UnderNoSync {
    std::set<size_t> apart{};  // parameters that the reducer does not have, and that were trainable in a forward
    std::optional<std::vector<ChangedValue>> changed{};  // see changed_values()
    bool backward = false;                               // one has run since the last step
  } under_no_sync{};
  std::shared_ptr<GradientConsumer> consumer{};  // of the present reducer
  std::function<void()> before_backward{};       // see ReducerCallbacks; empty: nothing
  std::optional<double> share{};                 // see ReducerCallbacks
  LoggingData::Settings settings{};              // for logging
  int no_sync_depth = 0;
  bool entered = false;                // the running or last forward has entered a step that other ranks wait for
  ParameterWatch after_micro_batch{};  // parameters as the last forward under no_sync has left them

  // Parameters whose memory was replaced since the last check. Where a step begins with a backward under no_sync, ranks
  // compare those from before its forwards: other ranks may have no such micro-batch. Its forwards may replace memory,
  // and after the backward the program may change values by gradients of this rank, as sharpness-aware training does.
  std::vector<ChangedValue> changed_values() const;
  void note_changed_before_micro_batch();
  void note_memory_after_micro_batch();
  // Throws UsageError if the shape of a parameter has changed. Not collective.
  void require_shapes() const;
  // UsageError that names what keeps the present group. For Elastic.
  void require_regroupable() const;
  // Creates the reducer, or replaces it.
  void make_reducer(std::vector<Gradient> gradients, const ReducerOptions& options,
                    std::unique_ptr<GradientReduction> reduction);
  // For a strategy that replaces its reducer. UsageError for a parameter that was unfrozen for micro-batches only.
  void note_apart();
  void require_none_apart();
  // Replaces the reducer after parameters were frozen, unfrozen or converted. Collective.
  void refresh_reducer();
};

// What of a module and the hook of its reducer keeps the present group, for errors.
std::vector<std::string> keepers_of_groups(const torch::nn::Module& module, const Reducer& reducer);

// The current reducer of a wrapper.
Reducer& reducer_of(DataParallelCore& parallel);
// The parameters and buffers that it has, without ignored ones.
const ModuleTensors& tensors_of(DataParallelCore& parallel);
// Whether all ranks began with rank 0's values.
bool was_synchronized(DataParallelCore& parallel);
// See ReducerCallbacks::share. For Elastic.
void set_share(DataParallelCore& parallel, std::optional<double> share);

enum class Deferred { materialize, keep };

// Lists the module's tensors, compares them over the group and, with `sync`, broadcasts rank 0's values. Parameters of
// a DeferredInit scope are materialized, or with `keep` remain deferred. `name` is that of the wrapper, for errors.
// Throws UsageError for nullptr, for a module without trainable parameters, and for parameters of other wrappers.
// Collective.
std::unique_ptr<DataParallelCore::State> wrap(std::shared_ptr<torch::nn::Module> module, const Group& group,
                                              const std::string& name, const std::vector<std::string>& ignored,
                                              bool sync, Deferred deferred = Deferred::materialize,
                                              OtherWrappers other_wrappers = OtherWrappers::refused);

// Throws UsageError, which names the module, if the forward of a sub-module communicates (SyncBatchNorm).
void check_forward_is_local(const torch::nn::Module& module);

// Gradients of the trainable parameters, for the reducer.
std::vector<Gradient> gradients_of(const ModuleTensors& tensors);

// Makes dense gradients of 16-bit parameters accumulate and reduce in float32.
void widen(std::vector<Gradient>& gradients);

}  // namespace shoal
