#include "shoal/strategy/local_updates.h"

#include <fmt/format.h>
#include <torch/utils.h>

#include "engine/data_parallel_state.h"
#include "shoal/base/error.h"
#include "strategy/local_updates/state.h"

namespace shoal {

using State = LocalUpdates::State;

void State::check_trainable() const {
  if (const auto change = known.change(optimizer.param_groups()); !change.empty()) {
    throw UsageError(
        fmt::format("LocalUpdates: {} after the construction, which is not exchanged; construct it anew", change));
  }
  for (const auto& entry : tensors.parameters) {
    if (!entry.tensor.requires_grad() || exchanged.count(entry.tensor.unsafeGetTensorImpl()) > 0) continue;
    throw UsageError(fmt::format(
        "LocalUpdates: {} requires a gradient, which it did not at the construction; construct it anew", entry.name));
  }
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

void State::end_step() {
  set_steps(steps + 1);
  const auto step = steps - options.warmup_steps;
  for (size_t i = 0; i < fragments.size(); ++i) {
    auto& fragment = fragments[i];
    if (step == 0) fragment.anchor();
    if (fragment.due(step)) {
      fragment.send(group, optimizer, {steps, static_cast<int64_t>(i), "parameters, or their movement"});
    }
    if (fragment.due(step - options.delay)) fragment.apply(optimizer);
  }
  if (!options.average_buffers || steps % options.every != 0) return;
  const auto buffers = averaged_buffers();
  auto mean = mean_of(buffers, {steps, -1, "buffers"});
  for (size_t i = 0; i < buffers.size(); ++i) at::Tensor(buffers[i]).copy_(mean.wait()[i]);
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
    } catch (const Error&) {  // NOLINT(bugprone-empty-catch): the group says it at its next call
    }
  }
}

void LocalUpdates::step(bool update) {
  auto& state = *state_;
  state.check_trainable();
  if (state.reducer && state.reducer->broken()) {
    throw UsageError("LocalUpdates: this rank's backward has failed, and the step counts on no rank: call zero_grad()");
  }
  if (update) state.optimizer.step();
  const torch::NoGradGuard no_grad;
  state.end_step();
}

void LocalUpdates::zero_grad() {
  if (state_->reducer) state_->reducer->settle();
  state_->optimizer.zero_grad();
}

MeanParameters LocalUpdates::mean_parameters() {
  const torch::NoGradGuard no_grad;
  auto& state = *state_;
  auto list = state.averaged_buffers();
  for (const auto& fragment : state.fragments) {
    for (const auto& piece : fragment.pieces()) list.push_back(piece.parameter);
  }
  auto mean = state.mean_of(list, {state.steps, -1, "mean parameters"});
  const auto& values = mean.wait();
  MeanParameters::Saved saved;
  for (size_t i = 0; i < list.size(); ++i) {
    saved.emplace_back(list[i], list[i].clone());
    list[i].copy_(values[i]);
  }
  return MeanParameters(std::move(saved));
}

MeanParameters::~MeanParameters() {
  const torch::NoGradGuard no_grad;
  for (auto& [tensor, own] : saved_) tensor.copy_(own);
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
