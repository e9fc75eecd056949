// State of LocalUpdates in checkpoints, by parameter name.

#include <fmt/format.h>
#include <torch/utils.h>

#include <algorithm>
#include <map>
#include <optional>

#include "engine/changes/changed_values.h"
#include "memory/views.h"
#include "shoal/error.h"
#include "strategy/local_updates/state.h"

namespace shoal {
namespace {

struct Entry {
  int64_t steps = 0;
  at::Tensor anchor, momentum, in_flight;
  double rate = 0;
  bool passed = false;
};

// Visits the fields that a piece's entry has. rate: whether a learning rate is one of them.
template <class Field>
void visit(Entry& entry, const Fragment::Piece& piece, bool under_way, bool rate, Field& field) {
  field("step", entry.steps);
  if (piece.anchor.defined()) field("anchor", entry.anchor);
  if (piece.momentum.defined()) field("momentum_buffer", entry.momentum);
  if (under_way) field("in_flight", entry.in_flight);
  if (rate) field("rate", entry.rate);
  if (entry.passed) field("passed", entry.passed);
}

// A copy in the layout of the piece's parameter.
at::Tensor adopted(const at::Tensor& from, at::ScalarType dtype, const Fragment::Piece& piece, const char* field) {
  if (!from.defined()) return {};
  const auto& parameter = piece.parameter;
  if (from.sizes() != parameter.sizes()) {
    throw UsageError(
        fmt::format("LocalUpdates: the shape of the state's {} of parameter {} differs from that of the parameter",
                    field, piece.name));
  }
  const auto options = parameter.options().dtype(dtype).requires_grad(false);
  auto copy = view_like(at::empty({parameter.numel()}, options), 0, parameter);
  return copy.copy_(from);
}

// Of all pieces, in memory of their own. UsageError if `whole` is not the state of such a training.
std::map<std::string, Entry> entries_of(const LocalUpdates::State& state, const OptimizerState& whole, bool in_flight) {
  const bool slow = std::holds_alternative<SlowMo>(state.options.outer);
  std::map<std::string, Entry> entries;
  std::optional<int64_t> loaded;
  for (const auto& fragment : state.fragments) {
    for (const auto& piece : fragment.pieces()) {
      const auto found = whole.find(piece.name);
      if (found == whole.end()) {
        throw UsageError(fmt::format("LocalUpdates: the state has no entry for parameter {}", piece.name));
      }
      const auto number = found->second.numbers.find("step");
      if (number != found->second.numbers.end() && !loaded) loaded = static_cast<int64_t>(number->second);
      auto& entry = entries[piece.name];
      entry.passed = found->second.numbers.contains("passed");
      detail::StateWriter writer(found->second, "parameter " + piece.name + " of LocalUpdates with these options");
      const bool under_way = in_flight && fragment.under_way(loaded.value_or(0) - state.options.warmup_steps);
      visit(entry, piece, under_way, slow && (under_way || !in_flight), writer);
      writer.finish();
      if (entry.steps != *loaded || *loaded < 0) {
        throw UsageError(fmt::format("LocalUpdates: the state of parameter {} is from step {}, others from step {}",
                                     piece.name, entry.steps, *loaded));
      }
      const auto outer = widened(piece.parameter.scalar_type());
      entry.anchor = adopted(entry.anchor, outer, piece, "anchor");
      entry.momentum = adopted(entry.momentum, outer, piece, "momentum_buffer");
      entry.in_flight = adopted(entry.in_flight, state.options.reduce_dtype.value_or(outer), piece, "in_flight");
    }
  }
  for (const auto& [name, entry] : whole) {
    if (entries.count(name) > 0) continue;
    throw UsageError(
        fmt::format("LocalUpdates: the state has an entry for {}, which is not a trainable parameter", name));
  }
  return entries;
}

}  // namespace

OptimizerState LocalUpdates::State::named_state(bool in_flight) {
  const bool slow = std::holds_alternative<SlowMo>(options.outer);
  OptimizerState whole;
  for (auto& fragment : fragments) {
    const bool under_way = in_flight && !fragment.mean().empty();
    const auto mean = under_way ? fragment.mean().wait() : std::vector<at::Tensor>();
    for (size_t i = 0; i < fragment.pieces().size(); ++i) {
      const auto& piece = fragment.pieces()[i];
      Entry entry{steps,          piece.anchor,
                  piece.momentum, under_way ? mean[i] : at::Tensor(),
                  piece.rate,     under_way && piece.passed};
      detail::StateReader reader;
      visit(entry, piece, under_way, slow && (under_way || !in_flight), reader);
      whole[piece.name] = std::move(reader.named);
    }
  }
  return whole;
}

namespace {

// Of tensors whose values differ between ranks, which others have loaded from a file that lacks these. Collective.
std::vector<size_t> different(const Group& group, const std::vector<at::Tensor>& tensors, const Label& label) {
  std::vector<int64_t> digests;
  for (const auto& tensor : tensors) digests.push_back(static_cast<int64_t>(digest_of(tensor) >> 1));
  const auto own = at::tensor(digests, at::kLong);
  const auto ends = at::stack({own, -own});
  group.all_reduce(ends, ReduceOp::max, label).wait();
  std::vector<size_t> list;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto column = ends.select(1, static_cast<int64_t>(i));
    if (column[0].item<int64_t>() != -column[1].item<int64_t>()) list.push_back(i);
  }
  return list;
}

}  // namespace

void LocalUpdates::State::start_afresh() {
  std::vector<Fragment::Piece*> pieces;
  for (auto& fragment : fragments) {
    fragment.mean().wait();  // finish the exchange that began before
    fragment.mean() = {};
    fragment.anchor();
    for (auto& piece : fragment.pieces()) {
      if (piece.momentum.defined()) piece.momentum.zero_();
      pieces.push_back(&piece);
    }
  }
  set_steps(0);
  const Label label{-1, -1, "parameters after a load"};
  const auto all = parameters();
  std::vector<at::Tensor> values;
  const auto places = different(group, all, label);
  for (const auto place : places) values.push_back(all[place]);
  auto mean = mean_of(values, label);
  for (size_t i = 0; i < places.size(); ++i) {
    auto& piece = *pieces[places[i]];
    if (piece.anchor.defined()) piece.anchor.copy_(mean.wait()[i]);
    if (reducer) piece.parameter.copy_(mean.wait()[i]);  // in the warm-up ranks train the same parameters
  }
  mean.wait();
  steps_exchanged = 0;
  note();
}

void LocalUpdates::State::check(const OptimizerState& whole, bool in_flight) const {
  entries_of(*this, whole, in_flight);
}

void LocalUpdates::State::complete(OptimizerState& whole) const {
  std::vector<const Fragment::Piece*> lacking;
  std::vector<at::Tensor> values;
  for (const auto& fragment : fragments) {
    for (const auto& piece : fragment.pieces()) {
      if (whole.contains(piece.name)) continue;
      lacking.push_back(&piece);
      values.push_back(piece.parameter);
    }
  }
  if (lacking.empty() || whole.empty()) return;
  const auto& known = whole.begin()->second.numbers;
  const auto step = known.find("step");
  if (step == known.end()) return;  // load() refuses it
  auto mean = mean_of(values, {-1, -1, "parameters that begin"});
  const bool slow = std::holds_alternative<SlowMo>(options.outer);
  for (const auto& fragment : fragments) {
    const bool under_way = fragment.under_way(static_cast<int64_t>(step->second) - options.warmup_steps);
    for (const auto& piece : fragment.pieces()) {
      const auto found = std::find(lacking.begin(), lacking.end(), &piece);
      if (found == lacking.end()) continue;
      const auto& value = mean.wait()[static_cast<size_t>(found - lacking.begin())];
      auto& entry = whole[piece.name];
      entry.numbers["step"] = step->second;
      if (piece.anchor.defined()) entry.tensors["anchor"] = value;
      if (piece.momentum.defined()) entry.tensors["momentum_buffer"] = at::zeros_like(value);
      if (!under_way) continue;
      // The exchange in flight does not have it.
      entry.tensors["in_flight"] = value;
      entry.numbers["passed"] = 1;
      if (slow) entry.numbers["rate"] = 0;
    }
  }
}

OptimizerState LocalUpdates::state_dict() {
  const torch::NoGradGuard no_grad;
  auto whole = state_->named_state();
  for (auto& [name, entry] : whole) {
    for (auto& [field, tensor] : entry.tensors) tensor = tensor.clone();
  }
  return whole;
}

void LocalUpdates::load_state_dict(const OptimizerState& whole) {
  const torch::NoGradGuard no_grad;
  state_->load(whole, /*in_flight=*/true);
  state_->restored = true;
}

void LocalUpdates::State::load(const OptimizerState& whole, bool in_flight) {
  const auto entries = entries_of(*this, whole, in_flight);
  for (auto& fragment : fragments) {
    std::vector<at::Tensor> sent;
    for (auto& piece : fragment.pieces()) {
      const auto& entry = entries.at(piece.name);
      piece.anchor = entry.anchor;
      piece.momentum = entry.momentum;
      piece.rate = entry.rate;
      piece.passed = entry.passed;
      if (entry.in_flight.defined()) sent.push_back(entry.in_flight);
    }
    if (in_flight) fragment.mean().wait();  // finish the exchange that began before
    fragment.mean() = Mean(std::move(sent));
  }
  if (!entries.empty()) set_steps(entries.begin()->second.steps);
  steps_exchanged = steps;
  note();
}

}  // namespace shoal
