#include "engine/checkpoint/loader.h"

#include <c10/util/accumulate.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/utils.h>

#include <algorithm>
#include <charconv>
#include <set>
#include <string_view>

#include "checkpoint/loading/match.h"
#include "engine/checkpoint/names.h"
#include "engine/checkpoint/parsed_entry.h"
#include "optim/state.h"
#include "shoal/error.h"

namespace shoal {

namespace names = checkpoint_names;
using Json = nlohmann::json;

namespace {

std::string listed(const std::vector<std::string>& all) {
  constexpr size_t most = 20;
  const auto shown =
      std::vector<std::string>(all.begin(), all.begin() + static_cast<int64_t>(std::min(all.size(), most)));
  return fmt::format("{}{}", fmt::join(shown, ", "),
                     all.size() > most ? fmt::format(" and {} more", all.size() - most) : "");
}

// Takes "ranks.N." from the front of a name; returns N.
std::optional<int> take_rank(std::string_view& name) {
  constexpr std::string_view prefix = "ranks.";
  if (!name.starts_with(prefix)) return std::nullopt;
  int rank = 0;
  const auto* begin = name.data() + prefix.size();
  const auto* end = name.data() + name.size();
  const auto found = std::from_chars(begin, end, rank);
  if (found.ec != std::errc() || found.ptr == end || *found.ptr != '.') return std::nullopt;
  name.remove_prefix(static_cast<size_t>(found.ptr + 1 - name.data()));
  return rank;
}

}  // namespace

TrainingLoader::TrainingLoader(const SliceReader& reader, CheckpointView view, std::optional<int> peer,
                               const Group& group, bool exact, const LoadOptions& options)
    : reader_(reader),
      view_(std::move(view)),
      diverges_(peer.has_value()),
      rank_(group.rank()),
      ranks_(group.size()),
      exact_(exact),
      options_(options) {
  take_stored_names();
  find_states(peer);
}

// Of ranks that have state of their own, the first of the peers writes the common one, which may lack parameters that
// it has not used.
void TrainingLoader::find_states(std::optional<int> peer) {
  constexpr std::string_view prefix = "optimizer.";
  constexpr int common = -1;
  const auto& tensors = reader_.index().tensors;
  std::map<int, std::map<std::string, StoredState>> found;
  for (const auto& [name, tensor] : tensors) {
    std::string_view rest = name;
    const auto rank = tensor.part == names::ranks_part ? take_rank(rest) : std::nullopt;
    if ((!rank && tensor.part != names::optimizer_part) || !rest.starts_with(prefix)) continue;
    rest.remove_prefix(prefix.size());
    auto dot = rest.rfind('.');
    while (dot != std::string_view::npos && dot > 0 && !tensors.contains(std::string(rest.substr(0, dot)))) {
      dot = rest.rfind('.', dot - 1);  // of a field with a dot in its name
    }
    const auto ranks = static_cast<int>(reader_.index().rank_states.size());
    if (dot == std::string_view::npos || rank.value_or(common) >= ranks) continue;
    auto& state = found[rank.value_or(common)][std::string(rest.substr(0, dot))];
    state.rank = rank;
    state.fields.emplace_back(rest.substr(dot + 1));
  }
  std::map<std::string, StoredState> own;
  for (const auto& share : view_.shares) {
    for (const auto& piece : share.pieces) {
      if (!is_own(piece.name, diverges_) || !own_.insert(piece.name).second) continue;
      const bool first = view_.own.contains(piece.name) || !peer ? rank_ == 0 : *peer == 0;
      auto& states = found[first ? common : rank_];
      if (const auto state = states.find(piece.name); state != states.end()) own.insert(*state);
    }
  }
  const auto whole = [&](const std::string& parameter, const StoredState& state) {
    return tensors.contains(parameter) &&
           std::all_of(state.fields.begin(), state.fields.end(), [&](const std::string& field) {
             const auto& stored = tensors.at(names::of_rank(*state.rank, names::state_tensor(parameter, field))).shape;
             return stored == tensors.at(parameter).shape || c10::multiply_integers(stored) == 1;
           });
  };
  for (auto& [rank, states] : found) {
    for (auto& [parameter, state] : states) {
      if (rank == common || whole(parameter, state)) states_.try_emplace(parameter, std::move(state));
    }
  }
  for (const auto& name : own_) states_.erase(name);
  states_.merge(own);
}

// Lists what ranks had values of their own of there, or have here, where the other side has one value for all.
void TrainingLoader::note_common() {
  if (!exact_) return;
  std::vector<std::string> common;
  std::vector<std::string> missing;
  for (const auto& share : view_.shares) {
    for (const auto& piece : share.pieces) {
      if (own_.contains(piece.name) || piece.parameter.numel() == 0) continue;
      if (reader_.has(names::of_rank(rank_, piece.name), names::ranks_part)) common.push_back(piece.name);
      if (share.everywhere && view_.own.contains(piece.name)) missing.push_back(piece.name);
    }
  }
  if (!common.empty()) {
    differences_.push_back(fmt::format(
        "each rank had values of its own in the checkpoint, here all ranks begin with the same: {}", listed(common)));
  }
  if (!missing.empty() && ranks_ > 1) {
    differences_.push_back(fmt::format(
        "the checkpoint has the same values for all ranks, here each rank has its own: {}", listed(missing)));
  }
}

// A tied tensor may have another of its names there.
void TrainingLoader::take_stored_names() {
  std::map<std::string, std::string> stored;
  for (const auto& [name, aliases] : view_.aliases) {
    if (reader_.has(name, "model")) continue;
    const auto alias = std::find_if(aliases.begin(), aliases.end(),
                                    [this](const std::string& other) { return reader_.has(other, "model"); });
    if (alias != aliases.end()) stored[name] = *alias;
  }
  if (stored.empty()) return;
  const auto take = [&](std::string& name) {
    if (const auto found = stored.find(name); found != stored.end()) name = found->second;
  };
  for (auto& share : view_.shares) {
    for (auto& piece : share.pieces) take(piece.name);
  }
  for (auto* list : {&view_.rest, &view_.buffers}) {
    for (auto& slice : *list) take(slice.name);
  }
  for (auto& [parameter, name] : view_.names) take(name);
  for (const auto& [name, alias] : stored) {
    auto entry = view_.aliases.extract(name);
    std::replace(entry.mapped().begin(), entry.mapped().end(), alias, name);
    entry.key() = alias;
    view_.aliases.insert(std::move(entry));
  }
}

std::set<std::string> TrainingLoader::trained_there() const {
  const auto& global = reader_.index().global_state;
  if (!global.contains(names::trained)) {
    throw UsageError(
        fmt::format("{} holds no optimizer state; set model_only to load the model alone", reader_.name()));
  }
  return parsed_entry(reader_, names::trained, [&] { return global[names::trained].get<std::set<std::string>>(); });
}

std::set<std::string> TrainingLoader::trained_there_alone() const {
  if (model_only() || !reader_.index().global_state.contains(names::trained)) return {};
  auto all = trained_there();
  for (const auto& share : view_.shares) {
    for (const auto& piece : share.pieces) all.erase(piece.name);
  }
  std::erase_if(all, [this](const auto& name) { return !states_.contains(name) && numbers_of(name).empty(); });
  return all;
}

std::vector<std::string> TrainingLoader::trained_here_alone(const std::set<std::string>& there) const {
  std::vector<std::string> names;
  std::set<std::string> seen;
  for (const auto& share : view_.shares) {
    for (const auto& piece : share.pieces) {
      const bool first = seen.insert(piece.name).second;
      if (first && !there.contains(piece.name) && piece.parameter.requires_grad()) names.push_back(piece.name);
    }
  }
  return names;
}

// What is frozen on one of the two sides, and has never been updated, needs no state. What was frozen there, or had no
// optimizer, begins without.
void TrainingLoader::check_trained() const {
  const auto there = trained_there();
  const auto missing = trained_here_alone(there);
  const auto extra = trained_there_alone();
  const bool common = std::any_of(view_.shares.begin(), view_.shares.end(), [&](const auto& share) {
    return std::any_of(share.pieces.begin(), share.pieces.end(),
                       [&](const StatePiece& piece) { return there.contains(piece.name); });
  });
  if (extra.empty() && (missing.empty() || common || there.empty())) return;
  std::string text;
  if (!missing.empty()) text = "not trained there: " + listed(missing);
  if (!extra.empty()) {
    text += (text.empty() ? "" : "; ") + std::string("not trained here: ") + listed({extra.begin(), extra.end()});
  }
  const auto* thaw = extra.empty() ? ""
                                   : "make trainable what was trained there (requires_grad, and among the optimizer's "
                                     "parameters) before this training is constructed, or ";
  throw UsageError(
      fmt::format("{}: its optimizer state is for other parameters: {}; {}set model_only to load the model alone",
                  reader_.name(), text, thaw));
}

void TrainingLoader::check() const {
  std::vector<WantedTensor> wanted;
  std::set<std::string> trained;
  for (const auto& share : view_.shares) {
    for (const auto& piece : share.pieces) {
      if (trained.insert(piece.name).second)
        wanted.push_back({piece.name, piece.parameter.sizes().vec(), piece.parameter.scalar_type()});
    }
  }
  std::set<std::string> seen;  // a frozen parameter may have several slices
  for (const auto* list : {&view_.rest, &view_.buffers}) {
    for (const auto& slice : *list) {
      if (seen.insert(slice.name).second) wanted.push_back({slice.name, slice.shape, slice.values.scalar_type()});
    }
  }
  for (const auto& name : view_.transient) {
    if (reader_.has(name, "model")) wanted.push_back({name, reader_.tensor(name).shape});
  }
  for (auto& tensor : wanted) {
    const auto aliases = view_.aliases.find(tensor.name);
    if (aliases != view_.aliases.end()) tensor.aliases = aliases->second;
  }
  require_match(reader_, wanted, options_.partial);
  if (!model_only()) check_trained();
}

TrainingLoader::FreshState TrainingLoader::made_state(const torch::optim::Optimizer& of, const StatePiece& piece,
                                                      const NamedState& state) const {
  try {
    return make_state(of, param_group_of(of, piece.updated.unsafeGetTensorImpl()), state);
  } catch (const UsageError& error) {
    throw UsageError(
        fmt::format("{}: the optimizer state of {}: {}; take the optimizer that the checkpoint was saved with, or "
                    "set model_only to load the model alone",
                    reader_.name(), piece.name, error.what()));
  }
}

void TrainingLoader::read_optimizers() {
  if (model_only()) return;
  read_options();
  if (param_groups_ && !states_.empty()) param_groups_->require_kin();
  if (const auto fresh = trained_here_alone(trained_there()); !fresh.empty()) {
    differences_.push_back(
        fmt::format("{}: not trained in the checkpoint; their optimizer state begins anew", listed(fresh)));
  }
  for (const auto& share : view_.shares) {
    for (const auto& piece : share.pieces) {
      if (piece.owner != share.rank || !piece.updated.defined() || share.local == nullptr) continue;
      const auto state = read_state(piece);
      const bool never_updated = state.tensors.empty() && state.numbers.empty();
      fresh_.emplace_back(std::pair(share.local, static_cast<void*>(piece.updated.unsafeGetTensorImpl())),
                          never_updated ? nullptr : made_state(*share.local, piece, state));
    }
  }
}

std::vector<std::string> TrainingLoader::differences() const {
  auto all = differences_;
  if (param_groups_) {
    for (auto& difference : param_groups_->differences()) all.push_back(std::move(difference));
  }
  return all;
}

}  // namespace shoal
