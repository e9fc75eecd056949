#include "engine/checkpoint/options.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "base/printable.h"
#include "optim/named_options.h"
#include "shoal/error.h"

namespace shoal {
namespace {

using Json = nlohmann::json;
using torch::optim::OptimizerParamGroup;

constexpr const char* parameters_entry = "parameters";
constexpr const char* type_entry = "type";
constexpr const char* options_entry = "options";
constexpr const char* rate = "lr";

using Names = std::map<const c10::TensorImpl*, std::string>;

// Also of parameters that are frozen: their group's options count once they are trained.
Names names_of(const CheckpointView& view) {
  auto names = view.names;
  for (const auto& share : view.shares) {
    for (const auto& piece : share.pieces) names.emplace(piece.parameter.unsafeGetTensorImpl(), piece.name);
  }
  return names;
}

// among: parameters that are not among these do not count; nullptr: all count.
std::vector<std::string> names_in(const OptimizerParamGroup& group, const Names& names,
                                  const std::map<std::string, const Json*>* among = nullptr) {
  std::vector<std::string> list;
  for (const auto& parameter : group.params()) {
    const auto name = names.find(parameter.unsafeGetTensorImpl());
    if (name == names.end()) continue;
    if (among != nullptr && !among->contains(name->second)) continue;
    list.push_back(name->second);
  }
  return list;
}

bool is_trainable(const OptimizerParamGroup& group) {
  const auto& parameters = group.params();
  return std::any_of(parameters.begin(), parameters.end(), [](const auto& one) { return one.requires_grad(); });
}

size_t groups_of(const CheckpointView& view) {
  size_t count = 0;
  for (const auto* optimizer : view.optimizers) count += optimizer->param_groups().size();
  return count;
}

// Whether the group at this place, of as many, has no names: so older checkpoints have one whose parameters were
// frozen.
bool nameless(const Json& stored, size_t groups, size_t place) {
  return stored.size() == groups && stored[place].at(parameters_entry).empty();
}

bool same_kind(const OptimizerParamGroup& group, const Json& stored) {
  return stored.at(type_entry).get<std::string>() == type_of(group.options());
}

// Stored options that the group also has.
Json taken(const OptimizerParamGroup& group, const Json& stored, bool rates, bool others) {
  const auto here = named_options(group.options());
  const bool kin = same_kind(group, stored);
  auto named = Json::object();
  for (const auto& [name, value] : stored.at(options_entry).items()) {
    if (here.contains(name) && (name == rate ? rates : others && kin)) named[name] = value;
  }
  return named;
}

}  // namespace

Json stored_options(const CheckpointView& view) {
  const auto names = names_of(view);
  auto list = Json::array();
  for (const auto* optimizer : view.optimizers) {
    for (const auto& group : optimizer->param_groups()) {
      list.push_back({{parameters_entry, names_in(group, names)},
                      {type_entry, type_of(group.options())},
                      {options_entry, named_options(group.options())}});
    }
  }
  return list.empty() ? Json() : list;
}

OptionsLoader::OptionsLoader(const CheckpointView& view, const Json& stored) : stored_(stored) {
  std::map<std::string, const Json*> by_parameter;
  for (const auto& group : stored_) {
    if (!group.at(options_entry).is_object()) throw UsageError("options have names");
    for (const auto& name : group.at(parameters_entry)) by_parameter[name.get<std::string>()] = &group;
  }
  const auto equal = [](const Json& a, const Json& b) {
    return a.at(type_entry) == b.at(type_entry) && a.at(options_entry) == b.at(options_entry);
  };
  const auto names = names_of(view);
  size_t number = 0;
  for (auto* optimizer : view.optimizers) {
    for (auto& group : optimizer->param_groups()) {
      const auto list = names_in(group, names, &by_parameter);
      Match match{fmt::format("param group {}", number++), &group, nullptr};
      if (!list.empty()) {
        match.stored = by_parameter.at(list.front());
        const bool agree = std::all_of(list.begin(), list.end(), [&](const std::string& name) {
          return equal(*by_parameter.at(name), *match.stored);
        });
        if (!agree) match.stored = nullptr;
      } else if (nameless(stored_, groups_of(view), number - 1) && !group.params().empty()) {
        match.stored = &stored_[number - 1];
      } else {
        if (is_trainable(group)) unknown_.push_back(match.name);
        continue;
      }
      if (match.stored != nullptr) {
        const auto copy = group.options().clone();
        set_options(*copy, taken(group, *match.stored, true, true));
      }
      matches_.push_back(std::move(match));
    }
  }
}

void OptionsLoader::require_kin() const {
  const auto is_pytorchs = [](const std::string& type) {
    const auto begin = type.find("options of ");
    return type.starts_with("torch::optim::") || (begin == 0 && type.find('.') == std::string::npos);
  };
  const auto is_adam = [](const std::string& type) {
    return type == "torch::optim::AdamOptions" || type == "torch::optim::AdamWOptions";
  };
  for (const auto& match : matches_) {
    if (match.stored == nullptr || dynamic_cast<const OptionsOfType*>(&match.group->options()) == nullptr) continue;
    const auto here = type_of(match.group->options());
    const auto there = match.stored->at(type_entry).get<std::string>();
    if (here == there || (is_adam(here) && is_adam(there)) || !is_pytorchs(here) || !is_pytorchs(there)) continue;
    throw UsageError(
        fmt::format("{} has {}, and the checkpoint's state is that of an optimizer with {}: take the same "
                    "optimizer, or set model_only",
                    match.name, here, printable(there)));
  }
}

void OptionsLoader::apply(bool rates, bool others) const {
  for (const auto& match : matches_) {
    if (match.stored == nullptr) continue;
    set_options(match.group->options(), taken(*match.group, *match.stored, rates, others));
  }
}

std::vector<std::string> OptionsLoader::differences() const {
  std::vector<std::string> list;
  for (const auto& name : unknown_) {
    list.push_back(
        fmt::format("{}: none of its parameters was in a group in the checkpoint; it keeps its options", name));
  }
  for (const auto& match : matches_) {
    if (match.stored == nullptr) {
      list.push_back(
          fmt::format("{}: its parameters had different options in the checkpoint; it keeps its own", match.name));
      continue;
    }
    if (!same_kind(*match.group, *match.stored)) {
      list.push_back(fmt::format("{}: it has {}, in the checkpoint {}; no more than the learning rate is taken",
                                 match.name, type_of(match.group->options()),
                                 printable(match.stored->at(type_entry).get<std::string>())));
      continue;
    }
    const auto here = named_options(match.group->options());
    const auto& there = match.stored->at(options_entry);
    for (const auto& [name, value] : there.items()) {
      if (here.contains(name) && here[name] == value) continue;
      list.push_back(fmt::format("{}: {} is {}, in the checkpoint {}", match.name, printable(name),
                                 here.contains(name) ? here[name].dump() : "unknown", printable(value.dump())));
    }
    for (const auto& [name, value] : here.items()) {
      if (there.contains(name)) continue;
      list.push_back(
          fmt::format("{}: {} is {}, of which the checkpoint knows nothing", match.name, name, value.dump()));
    }
  }
  return list;
}

}  // namespace shoal
