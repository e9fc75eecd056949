#include "shoal/local_updates.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/utils.h>

#include <algorithm>

#include "engine/changes/changed_values.h"
#include "engine/wrapper/data_parallel_state.h"
#include "shoal/error.h"
#include "shoal/group.h"
#include "strategy/local_updates/state.h"

namespace shoal {

using State = LocalUpdates::State;

void State::check_trainable() const {
  known_module.require_no_other();
  if (const auto change = known.change(optimizer.param_groups()); !change.empty()) {
    throw UsageError(fmt::format(
        "LocalUpdates: {} after construction and would not be exchanged; construct LocalUpdates again", change));
  }
  for (const auto& entry : tensors.parameters) {
    if (!entry.tensor.requires_grad() || exchanged.count(entry.tensor.unsafeGetTensorImpl()) > 0) continue;
    throw UsageError(fmt::format(
        "LocalUpdates: {} requires a gradient, but was frozen at construction; construct LocalUpdates again",
        entry.name));
  }
}

namespace {

struct Written {
  bool equal = false;   // all ranks have the same values
  bool loaded = false;  // some rank has loaded them
};

// What all ranks have done to parameters. Collective.
Written written_on_all(const Group& group, const std::vector<at::Tensor>& tensors, bool loaded, const Label& label) {
  uint64_t all = 1;
  for (const auto& tensor : tensors) all = all * 31 + digest_of(tensor);
  const auto number = static_cast<int64_t>(all >> 1);
  auto ends = at::tensor({number, -number, loaded ? int64_t{1} : int64_t{0}}, at::kLong);
  group.all_reduce(ends, ReduceOp::max, label).wait();
  return {ends[0].item<int64_t>() == -ends[1].item<int64_t>(), ends[2].item<int64_t>() != 0};
}

}  // namespace

// Values that were loaded, or that all ranks have, replace theta. Others are local training, as an update is: a clamp
// of the weights, or averages that a program swaps in and out for an evaluation.
void State::adopt_changes() {
  if (!watch.changed()) {
    restored = false;
    return;
  }
  bool was_loaded = loads.changed(watch.parameters());
  const torch::NoGradGuard no_grad;
  std::vector<Fragment::Piece*> changed;
  std::vector<std::string> names;
  std::vector<at::Tensor> values;
  size_t number = 0;
  for (auto& fragment : fragments) {
    for (auto& piece : fragment.pieces()) {
      const auto i = number++;
      if (watch.other_kind(i)) {
        throw UsageError(fmt::format(
            "LocalUpdates: parameter {} has changed: {}. Revert the change, or construct LocalUpdates again",
            piece.name, watch.describe(i)));
      }
      if (!watch.changed(i)) continue;
      was_loaded = was_loaded || watch.replaced(i);
      changed.push_back(&piece);
      names.push_back(piece.name);
      values.push_back(piece.parameter);
    }
  }
  if (std::exchange(restored, false)) return note();
  const bool keeps_none =
      std::none_of(changed.begin(), changed.end(), [](auto* piece) { return piece->anchor.defined(); });
  if (changed.empty() || (keeps_none && options.delay == 0 && !reducer)) return;
  const Label label{steps, -1, "replaced parameters"};
  agree(group, "parameters of LocalUpdates that were loaded or written, on all ranks or none", names);
  const auto written = written_on_all(group, values, was_loaded, label);
  const bool equal = written.equal;
  if (!equal && !written.loaded && !reducer) return;
  if (reducer && !equal) {
    throw DisagreeError(fmt::format(
        "LocalUpdates: in the warm-up all ranks train the same parameters, but {} were loaded, replaced or written "
        "with other values on each; load the same file on every rank",
        fmt::join(names, ", ")));
  }
  auto mean = mean_of(values, label);
  for (size_t i = 0; i < changed.size(); ++i) {
    changed[i]->passed = true;
    if (changed[i]->anchor.defined()) changed[i]->anchor.copy_(equal ? values[i] : mean.wait()[i]);
  }
  mean.wait();
}

void State::set_steps(int64_t number) {
  steps = number;
  if (steps >= options.warmup_steps) {
    reducer.reset();
  } else if (!reducer) {
    reducer = std::make_unique<Reducer>(gradients_of(tensors), group, ReducerOptions{.accept_unused = true},
                                        std::make_unique<AllReduce>(group, BucketCaps()));
  }
}

void State::count_step() {
  set_steps(steps + 1);
  if (steps == options.warmup_steps) {
    for (auto& fragment : fragments) fragment.anchor();
  }
  if (!exchange_due()) steps_exchanged = steps;
}

bool State::exchange_due() const {
  if (steps_exchanged == steps) return false;
  const auto step = steps - options.warmup_steps;
  const auto is_due = [&](const Fragment& part) { return part.due(step) || part.due(step - options.delay); };
  return std::any_of(fragments.begin(), fragments.end(), is_due) ||
         (steps % options.every == 0 && !averaged_buffers().empty());
}

void State::exchange() {
  const auto step = steps - options.warmup_steps;
  const auto due = [step](const Fragment& fragment) { return fragment.due(step); };
  if (std::holds_alternative<SlowMo>(options.outer) && std::any_of(fragments.begin(), fragments.end(), due)) {
    require_equal_rates();
  }
  for (size_t i = 0; i < fragments.size(); ++i) {
    if (!fragments[i].due(step)) continue;
    fragments[i].note_rates(optimizer);
    fragments[i].send(group, sent_as(steps, i));
  }
  for (auto& fragment : fragments) {
    if (fragment.due(step - options.delay)) fragment.mean().wait();
  }
  if (steps % options.every != 0) return;
  buffer_mean = mean_of(averaged_buffers(), {steps, -1, "buffers"});
  buffer_mean.wait();
}

void State::apply_exchange() {
  const auto step = steps - options.warmup_steps;
  for (auto& fragment : fragments) {
    if (fragment.due(step - options.delay)) fragment.apply(optimizer);
  }
  if (steps % options.every == 0) {
    const auto buffers = averaged_buffers();
    const auto& values = buffer_mean.wait();
    for (size_t i = 0; i < buffers.size(); ++i) at::Tensor(buffers[i]).copy_(values[i]);
    buffer_mean = {};
  }
  steps_exchanged = steps;
}

std::vector<at::Tensor> State::parameters() const {
  std::vector<at::Tensor> list;
  for (const auto& fragment : fragments) {
    for (const auto& piece : fragment.pieces()) list.push_back(piece.parameter);
  }
  return list;
}

std::vector<at::Tensor> State::averaged_buffers() const {
  std::vector<at::Tensor> list;
  for (const auto& entry : tensors.buffers) {
    if (options.average_buffers && entry.tensor.is_floating_point()) list.push_back(entry.tensor);
  }
  return list;
}

Mean State::mean_of(const std::vector<at::Tensor>& list, const Label& label) const {
  std::vector<at::ScalarType> dtypes;
  for (const auto& tensor : list) dtypes.push_back(widened(tensor.scalar_type()));
  return {group, list, dtypes, [&](size_t i, at::Tensor& out) { out.copy_(list[i]); }, label};
}

LocalUpdates::~LocalUpdates() {
  for (auto& fragment : state_->fragments) {
    try {
      fragment.mean().wait();
    } catch (...) {  // NOLINT(bugprone-empty-catch): the group's next call reports it
    }
  }
}

void LocalUpdates::step(bool update) {
  auto& state = *state_;
  if (state.means_shown > 0) {
    throw UsageError(
        "LocalUpdates: step() within a scope of mean_parameters(), whose parameters are the mean over ranks "
        "and go back to this rank's own at its end: end the scope first");
  }
  if (state.turn == State::Turn::no_step) {
    throw UsageError(
        "LocalUpdates: with Elastic, step() is called once in the second function of each Elastic::step(), and nowhere "
        "else");
  }
  state.check_trainable();
  if (state.reducer && state.reducer->broken()) {
    throw UsageError("LocalUpdates: backward failed on this rank, so the step counts on no rank: call zero_grad()");
  }
  if (state.turn == State::Turn::free) state.adopt_changes();
  try {
    if (update) state.optimizer.step();
  } catch (...) {
    state.note();  // takes this object's own updates into the snapshot
    throw;
  }
  const torch::NoGradGuard no_grad;
  state.count_step();
  if (state.turn == State::Turn::one_step) {
    state.turn = State::Turn::no_step;
  } else if (state.exchange_due()) {
    state.exchange();
    state.apply_exchange();
  }
  state.note();
}

void LocalUpdates::before_loading() {
  state_->loads.begin(state_->watch.parameters());
}

void LocalUpdates::parameters_loaded() {
  state_->loads.end();
}

void LocalUpdates::zero_grad(bool set_to_none) {
  if (state_->reducer) state_->reducer->settle();
  state_->optimizer.zero_grad(set_to_none);
}

MeanParameters LocalUpdates::mean_parameters() {
  const torch::NoGradGuard no_grad;
  auto& state = *state_;
  auto list = state.averaged_buffers();
  for (const auto& parameter : state.parameters()) list.push_back(parameter);
  auto mean =
      state.mean_of(list, {state.steps, -1, "mean parameters, after equal steps (step(false) without a batch)"});
  const auto& values = mean.wait();
  const bool untouched = !state.watch.changed();  // by the caller
  MeanParameters::Saved saved;
  for (size_t i = 0; i < list.size(); ++i) {
    saved.emplace_back(list[i], list[i].clone());
    list[i].copy_(values[i]);
  }
  ++state.means_shown;
  return MeanParameters(std::move(saved), [kept = std::weak_ptr(state_), untouched] {
    const auto state = kept.lock();  // none once this object is gone
    if (!state) return;
    --state->means_shown;
    if (untouched) state->note();
  });
}

int64_t LocalUpdates::steps() const {
  return state_->steps;
}

std::vector<std::vector<std::string>> LocalUpdates::fragments() const {
  std::vector<std::vector<std::string>> names;
  for (const auto& fragment : state_->fragments) {
    auto& list = names.emplace_back();
    for (const auto& piece : fragment.pieces()) list.push_back(piece.name);
  }
  return names;
}

}  // namespace shoal
