// Values that a TrainingLoader reads: those of the model, and an optimizer's state by parameter.

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/utils.h>

#include "engine/changes/former_values.h"
#include "engine/changes/operator_watch.h"
#include "engine/checkpoint/loader.h"
#include "engine/checkpoint/names.h"
#include "engine/checkpoint/parsed_entry.h"
#include "memory/views.h"
#include "optim/named_options.h"
#include "shoal/error.h"

namespace shoal {

namespace names = checkpoint_names;
using Json = nlohmann::json;

bool TrainingLoader::is_own(const std::string& name, bool differ) const {
  const bool ignored = view_.own.contains(name) && reader_.index().world_size == ranks_;
  return (ignored || (exact_ && differ)) && reader_.has(names::of_rank(rank_, name), names::ranks_part);
}

std::string TrainingLoader::own_name(const std::string& name, bool differ) const {
  return is_own(name, differ) ? names::of_rank(rank_, name) : name;
}

void TrainingLoader::read(const std::string& name, const Range& range, const at::Tensor& destination,
                          const std::vector<int64_t>& order) const {
  const bool convert = destination.is_floating_point() && at::isFloatingType(reader_.tensor(name).dtype);
  reader_.read(name, range, destination, {.order = order, .convert = convert});
}

void TrainingLoader::read_whole(const std::string& name, const at::Tensor& destination) const {
  read(name, {0, destination.numel()}, destination, {});
}

// Optimizer state has its parameter's dtype if it does in the checkpoint.
at::Tensor TrainingLoader::read_field(const StatePiece& piece, const StoredState& state,
                                      const std::string& field) const {
  const auto common = names::state_tensor(piece.name, field);
  const auto name = state.rank ? names::of_rank(*state.rank, common) : common;
  const bool own_piece = state.rank && own_.contains(piece.name);
  const auto& stored = reader_.tensor(name);
  const bool follows = stored.dtype == reader_.tensor(piece.name).dtype;
  const auto options =
      piece.parameter.options().requires_grad(false).dtype(follows ? piece.updated.scalar_type() : stored.dtype);
  const bool like_parameter = stored.shape == piece.parameter.sizes();
  if (piece.whole() || own_piece) {
    auto values = like_parameter ? at::empty_strided(piece.parameter.sizes(), dense_strides(piece.parameter), options)
                                 : at::empty(stored.shape, options);
    read_whole(name, values);
    return values;
  }
  if (!like_parameter) {
    throw UsageError(
        fmt::format("{}: {} is [{}], its parameter [{}]: the state of an optimizer that needs whole "
                    "parameters, which ranks divide here",
                    reader_.name(), name, fmt::join(stored.shape, ", "), fmt::join(piece.parameter.sizes(), ", ")));
  }
  auto values = at::empty({piece.range.size()}, options);
  read(name, piece.range, values, memory_order(piece.parameter));
  return values;
}

std::map<std::string, double> TrainingLoader::numbers_of(const std::string& parameter) const {
  return parsed_entry(reader_, names::numbers, [&] {
    const auto find = [&](const Json& state) -> std::map<std::string, double> {
      const auto entry = state.find(names::numbers);
      if (entry == state.end() || !entry->contains(parameter)) return {};
      return numbers_from(entry->at(parameter));
    };
    const auto& ranks = reader_.index().rank_states;
    if (own_.contains(parameter)) return find(ranks.at(rank_));
    const auto state = states_.find(parameter);
    if (state != states_.end() && state->second.rank) return find(ranks.at(static_cast<size_t>(*state->second.rank)));
    for (const auto& one : ranks) {
      if (auto found = find(one); !found.empty()) return found;
    }
    return std::map<std::string, double>();
  });
}

NamedState TrainingLoader::read_state(const StatePiece& piece) const {
  NamedState state{.tensors = {}, .numbers = numbers_of(piece.name)};
  const auto stored = states_.find(piece.name);
  if (stored == states_.end()) return state;
  for (const auto& field : stored->second.fields) state.tensors[field] = read_field(piece, stored->second, field);
  return state;
}

void TrainingLoader::read_model() const {
  const UnwatchedOperators own;  // each rank writes what it owns
  const auto has = [&](const std::string& name) {
    return !kept_.contains(name) && (!options_.partial || reader_.has(name, "model"));
  };
  for (const auto& share : view_.shares) {
    for (const auto& piece : share.pieces) {
      if (piece.owner != share.rank || !piece.updated.defined() || !has(piece.name)) continue;
      const auto name = own_name(piece.name, diverges_);
      const auto copy = piece.updated.detach();
      // Of the model alone, values of the parameters' dtype are what a program writes into them: a float32 copy that
      // rounds to them stays, as load_state_dict() may have brought it.
      const auto stored = reader_.tensor(name).dtype;
      const bool rounded = piece.main && model_only() && stored == piece.parameter.scalar_type();
      const auto values = rounded ? at::empty_like(copy, copy.options().dtype(stored)) : copy;
      if (piece.whole() || name != piece.name) {
        read_whole(name, values);
      } else {
        read(name, piece.range, values, memory_order(piece.parameter));
      }
      if (rounded) take_written(values, copy);
    }
  }
  const auto read_slice = [&](const NamedSlice& slice, bool differ) {
    if (!has(slice.name)) return;
    if (!is_own(slice.name, differ)) {
      read(slice.name, slice.range, slice.values, slice.order);
    } else if (slice.values.numel() > 0) {
      read_whole(names::of_rank(rank_, slice.name), slice.values);
    }
  };
  for (const auto& slice : view_.rest) read_slice(slice, diverges_ || view_.frozen_may_differ);
  for (const auto& slice : view_.buffers) read_slice(slice, true);
}

}  // namespace shoal
