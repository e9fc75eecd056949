// Parameters that the program has loaded, replaced, frozen or unfrozen since the last step, under a reducer.

#include <fmt/format.h>
#include <torch/utils.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <string>
#include <utility>

#include "engine/changes/changed_values.h"
#include "engine/changes/operator_watch.h"
#include "engine/wrapper/data_parallel_state.h"
#include "shoal/error.h"
#include "shoal/group.h"

namespace shoal {

void DataParallelCore::State::require_shapes() const {
  for (size_t i = 0; i < tensors.parameters.size(); ++i) {
    if (!watch.other_shape(i)) continue;
    throw UsageError(fmt::format("the shape of parameter {} has changed: {}; wrap the module after changing it",
                                 tensors.parameters[i].name, watch.describe(i)));
  }
}

std::vector<ChangedValue> DataParallelCore::State::changed_values() const {
  std::vector<ChangedValue> values;
  for (size_t i = 0; i < watch.parameters().size(); ++i) {
    const auto& entry = tensors.parameters[i];
    // Memory that belongs to the strategy (watchable tensors) holds values that the strategy wrote.
    if (!watch.changed(i) || is_watchable(entry.tensor)) continue;
    values.push_back({entry.name, digest_of(entry.tensor), /*frozen=*/!entry.tensor.requires_grad()});
  }
  return values;
}

// What earlier forwards of the step have replaced counts as it was before them.
void DataParallelCore::State::note_changed_before_micro_batch() {
  auto now = changed_values();
  if (const auto& former = under_no_sync.changed) {
    std::set<std::string> left;
    for (size_t i = 0; i < after_micro_batch.parameters().size(); ++i) {
      if (!after_micro_batch.replaced(i)) left.insert(tensors.parameters[i].name);
    }
    const auto as_left = [&](const ChangedValue& value) { return left.contains(value.name); };
    std::erase_if(now, as_left);
    std::copy_if(former->begin(), former->end(), std::back_inserter(now), as_left);
  }
  under_no_sync.changed = std::move(now);
}

void DataParallelCore::State::note_memory_after_micro_batch() {
  if (under_no_sync.changed && !under_no_sync.backward) after_micro_batch = ParameterWatch(watch.parameters());
}

// Micro-batches may have left gradients of what is frozen now on some ranks: the next step reduces those, too.
void DataParallelCore::State::refresh_reducer() {
  reducer->check_last_step();
  const auto left = reducer->left();
  std::vector<int> flags;
  for (const auto& entry : tensors.parameters) {
    const auto found = left.gradients.find(entry.tensor.unsafeGetTensorImpl());
    flags.push_back(!entry.tensor.requires_grad() && found != left.gradients.end() && found->second.used ? 1 : 0);
  }
  const auto anywhere = at::tensor(flags, at::kInt);
  group.all_reduce(anywhere, ReduceOp::max, {reducer->step(), -1, "gradients left of frozen parameters"}).wait();
  std::vector<NamedTensor> frozen;
  for (size_t i = 0; i < flags.size(); ++i) {
    if (anywhere.data_ptr<int>()[i] != 0) frozen.push_back(tensors.parameters[i]);
  }
  left_over.reset();
  if (!frozen.empty()) left_over = reducer->step();
  remake_reducer(consumer, frozen);
  reducer->resume(left);
}

void DataParallelCore::State::note_apart() {
  const auto& reduced = reducer->gradients();
  for (size_t i = 0; i < tensors.parameters.size(); ++i) {
    const auto& parameter = tensors.parameters[i].tensor;
    if (!watch.trainable_changed(i) || !parameter.requires_grad()) continue;
    const bool known = std::any_of(reduced.begin(), reduced.end(),
                                   [&](const auto& gradient) { return gradient.parameter.is_same(parameter); });
    if (!known) under_no_sync.apart.insert(i);
  }
}

// One that is trainable now gets into the reducer with what its grad() has.
void DataParallelCore::State::require_none_apart() {
  for (const auto i : under_no_sync.apart) {
    const auto& parameter = tensors.parameters[i].tensor;
    if (parameter.requires_grad() || !parameter.grad().defined()) continue;
    throw UsageError(fmt::format(
        "parameter {} was unfrozen for micro-batches under no_sync only, and ranks do not average what these gave: "
        "freeze it after the last micro-batch's forward, or drop its gradient",
        tensors.parameters[i].name));
  }
  under_no_sync.apart.clear();
}

// Parameters whose memory was replaced are trained on; ranks must agree on their values and properties, or all of them
// throw.
void DataParallelCore::adopt_changes(bool training) {
  auto& state = *state_;
  const bool reduced = state.left_over && *state.left_over < state.reducer->step();
  if (training && state.remake_reducer) state.no_sync_depth > 0 ? state.note_apart() : state.require_none_apart();
  if (!training) return;
  auto& under_no_sync = state.under_no_sync;
  if (state.no_sync_depth > 0) {
    if (!under_no_sync.backward) state.note_changed_before_micro_batch();
    return;
  }
  auto noted = std::exchange(under_no_sync.changed, std::nullopt);
  if (!std::exchange(under_no_sync.backward, false)) noted.reset();
  if (!reduced && !state.watch.changed()) return;
  // All parameters may be frozen for a while, such as a GAN's critic in the generator's step. There is nothing to
  // reduce then, and the reducer keeps its state.
  if (state.tensors.trainable().empty()) return;
  const auto values = noted ? *noted : state.changed_values();
  bool other_kind = reduced;
  for (size_t i = 0; i < state.tensors.parameters.size(); ++i) {
    other_kind = other_kind || state.watch.other_kind(i) || state.watch.trainable_changed(i);
  }
  if (other_kind) agree(state.group, "the model, whose parameters have changed", state.tensors.describe());
  if (!values.empty()) agree_on_values(state.group, values);
  if (other_kind && state.remake_reducer) state.refresh_reducer();
  state.watch.note();
}

}  // namespace shoal
