#include "shoal/detail/data_parallel.h"

#include <c10/util/ScopeExit.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/utils.h>

#include <algorithm>

#include "engine/changes/operator_watch.h"
#include "engine/changes/outside_inference_mode.h"
#include "engine/wrapper/data_parallel_state.h"
#include "engine/wrapper/logging.h"
#include "engine/wrapper/module_checks.h"
#include "module/sync.h"
#include "shoal/error.h"
#include "shoal/group.h"
#include "shoal/hooks.h"
#include "shoal/sync_batch_norm.h"

namespace shoal {
namespace {

// Scope in which gradients that no parameter has at present can be hooked; they may have one in the next step.
class Unfrozen {
 public:
  explicit Unfrozen(const std::vector<Gradient>& gradients) {
    for (const auto& gradient : gradients) {
      if (!gradient.parameter.requires_grad()) frozen_.push_back(gradient.parameter.set_requires_grad(true));
    }
  }
  ~Unfrozen() {
    for (const auto& parameter : frozen_) parameter.set_requires_grad(false);
  }
  Unfrozen(const Unfrozen&) = delete;
  Unfrozen& operator=(const Unfrozen&) = delete;

 private:
  std::vector<at::Tensor> frozen_;
};

}  // namespace

void check_forward_is_local(const torch::nn::Module& module) {
  for (const auto& named : module.named_modules()) {
    if (named.value()->as<SyncBatchNorm>() == nullptr) continue;
    throw UsageError(
        fmt::format("Join: {} is a SyncBatchNorm, whose forward is collective; set throw_on_early_termination, or do "
                    "not use Join and pass empty batches on ranks that have run out",
                    named.key()));
  }
}

std::vector<std::string> keepers_of_groups(const torch::nn::Module& module, const Reducer& reducer) {
  std::vector<std::string> list;
  if (dynamic_cast<const PostLocalSgdHook*>(reducer.reduction().hook()) != nullptr) {
    list.emplace_back("PostLocalSgdHook keeps groups of its own");
  }
  for (const auto& named : module.named_modules()) {
    if (named.value()->as<SyncBatchNorm>() == nullptr) continue;
    list.push_back(fmt::format("{} is a SyncBatchNorm, which keeps its group", named.key()));
  }
  return list;
}

void DataParallelCore::State::require_regroupable() const {
  auto faults = keepers_of_groups(*module, *reducer);
  if (buffers.hooked()) faults.emplace_back("a buffer_hook may keep its group");
  if (!faults.empty()) throw UsageError(fmt::format("Elastic: {}", fmt::join(faults, "; ")));
}

void DataParallelCore::State::make_reducer(std::vector<Gradient> gradients, const ReducerOptions& options,
                                           std::unique_ptr<GradientReduction> reduction) {
  const auto join_state = reducer ? reducer->join_state() : std::nullopt;
  const auto steps = reducer ? reducer->step() : 0;
  consumer = options.consumer;
  reducer.reset();  // destroy the old reducer first, because its hooks are on the same parameters
  if (options.consumer) require_usable(tensors, options.name_of_consumer, OtherWrappers::refused);
  {
    const Unfrozen hooked(gradients);
    reducer = std::make_shared<Reducer>(std::move(gradients), group, options, std::move(reduction));
  }
  reducer->count_from(steps);
  reducer->callbacks.synchronises = [this] { return no_sync_depth == 0; };
  reducer->callbacks.before_backward = [this] {
    if (no_sync_depth > 0) {
      if (!under_no_sync.changed) under_no_sync.changed = changed_values();  // the program has called its module itself
      under_no_sync.backward = true;
    }
    if (before_backward) before_backward();
  };
  reducer->callbacks.share = [this] { return share; };
  reducer->set_join_state(join_state);
  if (!buffers.hooked()) return;
  // Called late if a forward failed, or was never called.
  reducer->callbacks.before_writing = [this] { buffers.after_forward(); };
  reducer->callbacks.before_waiting = [this] { buffers.complete(); };
}

void DataParallelCore::before_backward(std::function<void()> listener) {
  state_->before_backward = std::move(listener);
}

Reducer& reducer_of(DataParallelCore& parallel) {
  return *parallel.state().reducer;
}

const ModuleTensors& tensors_of(DataParallelCore& parallel) {
  return parallel.state().tensors;
}

bool was_synchronized(DataParallelCore& parallel) {
  return parallel.state().synchronized;
}

void set_share(DataParallelCore& parallel, std::optional<double> share) {
  parallel.state().share = share;
}

DataParallelCore::DataParallelCore(std::unique_ptr<State> state) : state_(std::move(state)) {}

// The reducer may outlive the wrapper, because an optimizer may share it.
DataParallelCore::~DataParallelCore() {
  if (state_->reducer) state_->reducer->detach();
}

void DataParallelCore::before_forward() {
  const OutsideInferenceMode outside;
  auto& state = *state_;
  state.entered = false;
  if (torch::GradMode::is_enabled()) state.known.require_no_other();
  state.require_shapes();
  // Also under no_sync, because the peers wait in the step that failed here; not within a backward that still runs.
  if (state.no_sync_depth == 0 || !BackwardTracker::in_backward()) state.reducer->settle();
  if (state.no_sync_depth > 0 && torch::GradMode::is_enabled()) state.reducer->note_micro_batch();
  adopt_changes(torch::GradMode::is_enabled());
  begin_forward(torch::GradMode::is_enabled());
  if (!torch::GradMode::is_enabled()) {
    // Not between a forward and its backward, which may have saved buffers.
    const bool evaluates = state.no_sync_depth == 0 && !state.reducer->awaits_backward();
    if (evaluates) {
      state.buffers.before_evaluation(state.group, state.tensors.buffers, state.reducer->lead(), state.reducer->step());
    }
    return;
  }
  prepare();
  state.reducer->renew_hooks();
  if (state.no_sync_depth > 0) return;
  state.reducer->check_last_step();
  auto& reducer = *state.reducer;
  state.buffers.before_forward(state.group, state.tensors.buffers, reducer.lead(), reducer.step());
  if (state.tensors.trainable().empty()) return;  // no step: peers wait for nothing
  reducer.expect_backward();
  state.entered = true;
  // Checkpoints compute a forward again within backward, and may stop it early.
  if (!BackwardTracker::in_backward()) reducer.clock().mark(StepClock::forward_begins, reducer.step());
}

void DataParallelCore::after_forward(const std::vector<at::Tensor>& outputs) {
  const OutsideInferenceMode outside;
  const bool synchronises = state_->no_sync_depth == 0 && torch::GradMode::is_enabled();
  if (torch::GradMode::is_enabled()) {
    state_->reducer->note_forward();
    if (state_->no_sync_depth > 0) state_->note_memory_after_micro_batch();
  }
  if (state_->entered && !BackwardTracker::in_backward()) {
    state_->reducer->clock().mark(StepClock::forward_ends, state_->reducer->step());
  }
  end_forward(torch::GradMode::is_enabled());
  if (!synchronises) return;
  state_->buffers.after_forward();
  state_->reducer->inspect(outputs, state_->entered && state_->module->is_training());
}

void DataParallelCore::forward_failed() {
  const OutsideInferenceMode outside;
  if (state_->entered) state_->reducer->mark_failed();
  if (torch::GradMode::is_enabled()) return;
  try {
    end_forward(false);         // other ranks may need this rank's help to gather
  } catch (const CommError&) {  // NOLINT(bugprone-empty-catch): the original failure says more
  }
}

void DataParallelCore::backward(const at::Tensor& loss_sum, double weight) {
  state_->reducer->backward(loss_sum, weight);
}

const Group& DataParallelCore::group() const {
  return state_->group;
}

std::string DataParallelCore::open_scope() const {
  if (state_->no_sync_depth > 0) return "no_sync()";
  return state_->reducer->join_state() ? "a Join" : "";
}

void DataParallelCore::check_shadow() const {
  check_forward_is_local(*state_->module);
}

void DataParallelCore::shadow() {
  state_->reducer->require_absence();
  const at::AutoGradMode grad(true);
  try {
    before_forward();
    state_->reducer->reduce_now();
  } catch (...) {
    forward_failed();
    throw;
  }
}

void DataParallelCore::settle() {
  state_->reducer->settle();
  end_forward(/*training=*/false);  // other ranks may still be in an evaluation
}

void DataParallelCore::set_join_state(const std::optional<JoinState>& join_state) {
  state_->reducer->set_join_state(join_state);
}

void DataParallelCore::broadcast_model(int rank) {
  const auto& state = *state_;
  std::vector<at::Tensor> values;
  if (state.reducer->reduction().plan().everywhere()) {
    for (const auto& entry : state.tensors.parameters) values.push_back(entry.tensor);
  }
  for (const auto& entry : state.tensors.buffers) {
    if (state.adopts_buffers) values.push_back(entry.tensor);
  }
  const UnwatchedOperators own;
  broadcast_coalesced(state.group, values, rank, {state.reducer->step(), -1, "the last joiner's model"});
}

NoSync DataParallelCore::no_sync(bool accumulate) {
  return NoSync(accumulate ? &state_->no_sync_depth : nullptr);
}

const std::shared_ptr<torch::nn::Module>& DataParallelCore::module() const {
  return state_->module;
}

const Precision& DataParallelCore::precision() const {
  return state_->precision;
}

at::DeviceType DataParallelCore::device() const {
  return state_->tensors.parameters.front().tensor.device().type();
}

void DataParallelCore::abandon_step() {
  auto& state = *state_;
  // Micro-batches under no_sync, or a Join, have begun the step. The other ranks enter it with their last batch.
  if (state.reducer->has_only_micro_batches() || state.reducer->has_promised_batch()) {
    const at::AutoGradMode grad(true);
    const auto depth = std::exchange(state.no_sync_depth, 0);
    const auto restore = c10::make_scope_exit([&] { state.no_sync_depth = depth; });
    before_forward();
  }
  state_->reducer->mark_failed();  // an exception between forward and backward is nobody's but the caller's
  state_->reducer->abandon();
}

std::vector<std::vector<std::string>> DataParallelCore::buckets() const {
  return state_->reducer->buckets().names();
}

LoggingData DataParallelCore::logging_data() const {
  const auto& state = *state_;
  auto data = log_of(state.name, *state.module, state.group, state.settings);
  add_model(data, state.tensors);
  add_steps(data, *state.reducer);
  return data;
}

int64_t DataParallelCore::steps() const {
  return state_->reducer->step();
}

}  // namespace shoal
