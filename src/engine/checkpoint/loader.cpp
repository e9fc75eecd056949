#include "engine/checkpoint/loader.h"

#include <ATen/Context.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/utils.h>

#include <set>

#include "checkpoint/match.h"
#include "engine/checkpoint/names.h"
#include "memory/views.h"
#include "optim/state.h"
#include "shoal/base/error.h"

namespace shoal {

namespace names = checkpoint_names;
using Json = nlohmann::json;

namespace {

// Entries of the state are as trustworthy as the file they come from.
template <class Act>
auto parsed(const CheckpointReader& reader, const char* entry, const Act& act) {
  try {
    return act();
  } catch (const Json::exception&) {
    throw CheckpointError(
        fmt::format("{}: the entry \"{}\" of its state is not what shoal writes", reader.path().string(), entry));
  }
}

std::string listed(const std::vector<std::string>& all) {
  constexpr size_t most = 20;
  const auto shown =
      std::vector<std::string>(all.begin(), all.begin() + static_cast<int64_t>(std::min(all.size(), most)));
  return fmt::format("{}{}", fmt::join(shown, ", "),
                     all.size() > most ? fmt::format(" and {} more", all.size() - most) : "");
}

void check_trained(const CheckpointReader& reader, const std::set<std::string>& wanted) {
  const auto& global = reader.index().global_state;
  if (!global.contains(names::trained)) {
    throw UsageError(
        fmt::format("{} holds no optimizer state; set model_only to load the model alone", reader.path().string()));
  }
  const auto stored =
      parsed(reader, names::trained, [&] { return global[names::trained].get<std::set<std::string>>(); });
  std::vector<std::string> missing;
  std::vector<std::string> extra;
  std::set_difference(wanted.begin(), wanted.end(), stored.begin(), stored.end(), std::back_inserter(missing));
  std::set_difference(stored.begin(), stored.end(), wanted.begin(), wanted.end(), std::back_inserter(extra));
  if (missing.empty() && extra.empty()) return;
  std::string text;
  if (!missing.empty()) text = "not trained there: " + listed(missing);
  if (!extra.empty()) text += (text.empty() ? "" : "; ") + std::string("not trained here: ") + listed(extra);
  throw UsageError(fmt::format("{}: the optimizer is of other parameters: {}; model_only loads the model alone",
                               reader.path().string(), text));
}

}  // namespace

TrainingLoader::TrainingLoader(const CheckpointReader& reader, CheckpointView view, bool diverges, const Group& group,
                               bool exact, const LoadOptions& options)
    : reader_(reader),
      view_(std::move(view)),
      diverges_(diverges),
      rank_(group.rank()),
      ranks_(group.size()),
      exact_(exact),
      options_(options) {
  constexpr std::string_view prefix = "optimizer.";
  for (const auto& [name, tensor] : reader_.index().tensors) {
    const auto dot = name.rfind('.');
    if (tensor.part != names::optimizer_part || !name.starts_with(prefix) || dot < prefix.size()) continue;
    fields_[name.substr(prefix.size(), dot - prefix.size())].push_back(name.substr(dot + 1));
  }
}

void TrainingLoader::check() const {
  std::vector<WantedTensor> wanted;
  std::set<std::string> trained;
  for (const auto& share : view_.shares) {
    for (const auto& piece : share.pieces) {
      if (trained.insert(piece.name).second) wanted.push_back({piece.name, piece.parameter.sizes().vec()});
    }
  }
  std::set<std::string> seen;  // a frozen parameter may come in several slices
  for (const auto* list : {&view_.rest, &view_.buffers}) {
    for (const auto& slice : *list) {
      if (seen.insert(slice.name).second) wanted.push_back({slice.name, slice.shape});
    }
  }
  require_match(reader_, wanted, options_.partial);
  if (!model_only()) check_trained(reader_, trained);
}

std::string TrainingLoader::own_name(const std::string& name) const {
  const auto own = names::of_rank(rank_, name);
  return exact_ && !model_only() && reader_.index().tensors.contains(own) ? own : name;
}

void TrainingLoader::read(const std::string& name, const Range& range, const at::Tensor& destination,
                          const std::vector<int64_t>& order) const {
  const bool convert = destination.is_floating_point() && at::isFloatingType(reader_.tensor(name).dtype);
  reader_.read(name, range, destination, {.order = order, .convert = convert});
}

void TrainingLoader::read_whole(const std::string& name, const at::Tensor& destination) const {
  read(name, {0, destination.numel()}, destination, {});
}

// Moments follow their parameter's dtype where they do so in the checkpoint.
at::Tensor TrainingLoader::read_field(const StatePiece& piece, const std::string& common) const {
  const auto name = own_name(common);
  const auto& stored = reader_.tensor(name);
  const bool follows = stored.dtype == reader_.tensor(piece.name).dtype;
  const auto options =
      piece.parameter.options().requires_grad(false).dtype(follows ? piece.updated.scalar_type() : stored.dtype);
  const bool like_parameter = stored.shape == piece.parameter.sizes();
  if (piece.whole() || name != common) {
    auto values = like_parameter ? at::empty_strided(piece.parameter.sizes(), dense_strides(piece.parameter), options)
                                 : at::empty(stored.shape, options);
    read_whole(name, values);
    return values;
  }
  if (!like_parameter) {
    throw UsageError(fmt::format(
        "{}: {} is [{}], its parameter [{}]: the state of an optimizer that needs whole "
        "parameters, which ranks divide here",
        reader_.path().string(), name, fmt::join(stored.shape, ", "), fmt::join(piece.parameter.sizes(), ", ")));
  }
  auto values = at::empty({piece.range.size()}, options);
  read(name, piece.range, values, memory_order(piece.parameter));
  return values;
}

std::map<std::string, double> TrainingLoader::numbers_of(const std::string& parameter) const {
  return parsed(reader_, names::numbers, [&] {
    const auto find = [&](const Json& state) -> std::map<std::string, double> {
      const auto entry = state.find(names::numbers);
      if (entry == state.end() || !entry->contains(parameter)) return {};
      return entry->at(parameter).get<std::map<std::string, double>>();
    };
    const auto& ranks = reader_.index().rank_states;
    if (exact_ && diverges_) return find(ranks.at(rank_));
    for (const auto& state : ranks) {
      if (auto found = find(state); !found.empty()) return found;
    }
    return std::map<std::string, double>();
  });
}

NamedState TrainingLoader::read_state(const StatePiece& piece) const {
  NamedState state{.tensors = {}, .numbers = numbers_of(piece.name)};
  const auto fields = fields_.find(piece.name);
  if (fields == fields_.end()) return state;
  for (const auto& field : fields->second) {
    state.tensors[field] = read_field(piece, names::state_tensor(piece.name, field));
  }
  return state;
}

void TrainingLoader::read_optimizers() {
  if (model_only()) return;
  for (const auto& share : view_.shares) {
    for (const auto& piece : share.pieces) {
      if (piece.owner != share.rank || !piece.updated.defined() || share.local == nullptr) continue;
      const auto state = read_state(piece);
      const bool never_updated = state.tensors.empty() && state.numbers.empty();
      fresh_.emplace_back(std::pair(share.local, static_cast<void*>(piece.updated.unsafeGetTensorImpl())),
                          never_updated ? nullptr : make_state(*share.local, state));
    }
  }
}

void TrainingLoader::read_model() const {
  const auto has = [&](const std::string& name) { return !options_.partial || reader_.index().tensors.contains(name); };
  for (const auto& share : view_.shares) {
    for (const auto& piece : share.pieces) {
      if (piece.owner != share.rank || !piece.updated.defined() || !has(piece.name)) continue;
      const auto name = own_name(piece.name);
      const auto values = piece.updated.detach();
      if (piece.whole() || name != piece.name) {
        read_whole(name, values);
      } else {
        read(name, piece.range, values, memory_order(piece.parameter));
      }
    }
  }
  for (const auto* list : {&view_.rest, &view_.buffers}) {
    for (const auto& slice : *list) {
      if (has(slice.name)) read(own_name(slice.name), slice.range, slice.values, slice.order);
    }
  }
}

void TrainingLoader::restore(GradScaler* scaler) const {
  const auto& index = reader_.index();
  const auto* state = &index.global_state;
  if (!state->contains(names::scaler)) state = &index.rank_states.at(exact_ ? rank_ : 0);
  const auto entry = state->find(names::scaler);
  const bool there = entry != state->end();
  if (there != (scaler != nullptr)) {
    TORCH_WARN(reader_.path().string(), there ? " has the state of a loss scaler, which this training has not"
                                              : " has no state of a loss scaler; it starts anew");
    return;
  }
  if (!there) return;
  scaler->load(parsed(reader_, names::scaler, [&] {
    return GradScalerState{.scale = entry->at("scale").get<double>(),
                           .good_steps = entry->at("good_steps").get<int64_t>(),
                           .hysteresis_left = entry->at("hysteresis_left").get<int64_t>()};
  }));
}

void TrainingLoader::restore_random_numbers() const {
  if (reader_.index().world_size != ranks_) return;
  for (const auto& device : devices_of(view_)) {
    const auto name = names::of_rank(rank_, random_name(device));
    if (!reader_.index().tensors.contains(name)) continue;
    auto generator = at::globalContext().defaultGenerator(device);
    const auto state = reader_.read(name);
    const std::lock_guard lock(generator.mutex());
    generator.set_state(state);
  }
}

void TrainingLoader::finish(const Companions& companions) {
  if (model_only()) return;
  for (auto& [place, state] : fresh_) {
    auto& states = place.first->state();
    if (state) {
      states[place.second] = std::move(state);
    } else {
      states.erase(place.second);
    }
  }
  fresh_.clear();
  restore(view_.scaler != nullptr ? view_.scaler : companions.scaler);
  const auto& global = reader_.index().global_state;
  if (options_.rates && global.contains(names::rates)) {
    const auto rates = parsed(reader_, names::rates, [&] { return global[names::rates].get<std::vector<double>>(); });
    for (auto* optimizer : view_.rates) {
      auto& groups = optimizer->param_groups();
      for (size_t i = 0; i < groups.size() && rates.size() == groups.size(); ++i) groups[i].options().set_lr(rates[i]);
    }
  }
  auto schedules = view_.schedules;
  if (companions.schedule != nullptr) schedules.push_back(companions.schedule);
  if (!schedules.empty() && global.contains(names::schedule)) {
    const auto position = parsed(reader_, names::schedule, [&] { return global[names::schedule].get<int64_t>(); });
    for (auto* schedule : schedules) schedule->set_position(position);
  }
  restore_random_numbers();
}

}  // namespace shoal
