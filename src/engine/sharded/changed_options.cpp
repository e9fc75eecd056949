#include "engine/sharded/changed_options.h"

#include <fmt/format.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <type_traits>
#include <typeinfo>

#include "engine/changes/changed_values.h"
#include "optim/named_options.h"
#include "shoal/optim.h"

namespace shoal {
namespace {

using torch::optim::OptimizerOptions;

template <class... Types>
std::optional<bool> equal_as(const OptimizerOptions& a, const OptimizerOptions& b) {
  std::optional<bool> equal;
  const auto compare = [&]<class Type>(std::type_identity<Type>) {
    if (typeid(a) == typeid(Type)) equal = static_cast<const Type&>(a) == static_cast<const Type&>(b);
  };
  (compare(std::type_identity<Types>()), ...);
  return equal;
}

std::optional<double> rate_of(const OptimizerOptions& options) {
  try {
    return options.get_lr();
  } catch (const c10::Error&) {  // there is none
    return std::nullopt;
  }
}

// Of types that are known here.
std::optional<bool> equal_in_all(const OptimizerOptions& a, const OptimizerOptions& b) {
  using namespace torch::optim;
  return equal_as<SGDOptions, AdamOptions, AdamWOptions, AdagradOptions, RMSpropOptions, AccumAdamOptions, LambOptions,
                  AdafactorOptions, MuonOptions>(a, b);
}

bool equal(const OptimizerOptions& a, const OptimizerOptions& b) {
  if (dynamic_cast<const OptionsOfType*>(&a) != nullptr || typeid(a) != typeid(b)) return true;
  const auto known = equal_in_all(a, b);
  return known ? *known : rate_of(a) == rate_of(b);
}

std::string difference(const OptimizerOptions& before, const OptimizerOptions& now) {
  const auto rate = rate_of(now);
  if (!equal_in_all(before, now)) return fmt::format("lr {}", rate.value_or(NAN));
  const auto with_rate = before.clone();
  with_rate->set_lr(*rate);
  return equal(*with_rate, now) ? fmt::format("lr {}", *rate) : describe(now);
}

}  // namespace

std::vector<std::string> changed_options(const ParamGroups& before, const ParamGroups& now) {
  std::vector<std::string> lines;
  for (size_t number = 0; number < std::min(before.size(), now.size()); ++number) {
    const auto& old = before[number].options();
    const auto& fresh = now[number].options();
    if (!equal(old, fresh)) lines.push_back(fmt::format("param group {}: {}", number, difference(old, fresh)));
  }
  return lines;
}

void agree_on_options(const Group& group, const std::string& optimizer, const std::vector<std::string>& changed) {
  agree(group, fmt::format("changed options of {} (change them alike on every rank)", optimizer), changed);
}

uint64_t digest_of(const ParamGroups& groups) {
  std::string text;
  for (const auto& group : groups) {
    const auto named = named_options(group.options());
    for (const auto& [name, value] : named.items()) text += name + ' ' + rounded_text(value) + ',';
    text += ';';
  }
  return std::hash<std::string>()(text);
}

uint64_t digest_of(const OptimizerState& state) {
  std::string text;
  for (const auto& [name, entry] : state) {
    text += fmt::format("{};", name);
    for (const auto& [kind, tensor] : entry.tensors) text += fmt::format("{} {:x};", kind, digest_of(tensor));
    for (const auto& [kind, number] : entry.numbers) text += fmt::format("{} {};", kind, number);
  }
  return std::hash<std::string>()(text);
}

void agree_on_loaded_state(const Group& group, const std::string& optimizer, uint64_t digest) {
  agree(group, fmt::format("the loaded state of {} (load the same one on every rank)", optimizer),
        {fmt::format("a state of digest {:016x}", digest)});
}

}  // namespace shoal
