// Checkpoint source of LocalUpdates.

#include <fmt/format.h>
#include <torch/utils.h>

#include <variant>

#include "checkpoint/on_all_ranks.h"
#include "engine/checkpoint/reducers.h"
#include "engine/checkpoint/source.h"
#include "shoal/error.h"
#include "strategy/local_updates/state.h"

namespace shoal {
namespace {

using Json = nlohmann::json;

// Each rank has its own parameters and inner optimizer state. theta and its companions are the same on all ranks, so
// that any number of ranks can resume from them.
class LocalUpdatesSource : public CheckpointSource {
 public:
  LocalUpdatesSource(LocalUpdates& updates, LocalUpdates::State& state) : updates_(updates), state_(state) {}

  // The outer optimizers keep their momentum under one name, in other units.
  std::string strategy() const override {
    const auto& outer = state_.options.outer;
    if (std::holds_alternative<SlowMo>(outer)) return "slowmo";
    return std::holds_alternative<OuterNesterov>(outer) ? "diloco" : "local_sgd";
  }
  // Older checkpoints do not tell which one it was.
  bool continues(const std::string& saved) const override { return saved == strategy() || saved == "local_updates"; }
  Group group() override { return state_.group; }
  std::optional<Group> peers() override { return state_.group; }

  void require_own_values() const override {
    if (state_.means_shown == 0) return;
    throw UsageError(
        "LocalUpdates: a checkpoint within a scope of mean_parameters(), whose parameters are the mean over ranks and "
        "go back to this rank's own at its end: save and load outside of the scope. A checkpoint has the mean, too; "
        "save_module() within the scope writes it alone");
  }

  CheckpointView view() override {
    require_parameters_of(*state_.module, state_.optimizer);
    CheckpointView view;
    view.shares.push_back({.pieces = pieces_of(state_.optimizer, *state_.module), .local = &state_.optimizer});
    view.optimizers = {&state_.optimizer};
    add_rest(view, *state_.module);
    return view;
  }

  CarriedStates carried() override {
    const torch::NoGradGuard no_grad;
    CarriedStates all;
    if (state_.reducer) all.own = carried_by({state_.reducer.get()});
    for (const auto& [name, entry] : state_.named_state()) {
      all.common.values[name] = entry.numbers;
      for (const auto& [field, tensor] : entry.tensors) all.common.tensors[name + '.' + field] = tensor;
    }
    return all;
  }

  void begin_load(const CarriedStates& past) override {
    const torch::NoGradGuard no_grad;
    CheckpointSource::begin_load(past);
    if (past.common.values.is_null()) return;
    OptimizerState whole;
    on_all_ranks(group(), "checkpoint", [&] { whole = parsed(past.common); });
    state_.complete(whole);
    on_all_ranks(group(), "checkpoint", [&] { state_.check(whole, /*in_flight=*/true); });
  }

  void end_load(const CarriedStates& past) override {
    const torch::NoGradGuard no_grad;
    if (past.common.values.is_null()) {
      state_.start_afresh();
    } else {
      auto whole = parsed(past.common);
      state_.complete(whole);  // with the loaded values
      updates_.load_state_dict(whole);
    }
    differences_ = {};
    if (state_.reducer) differences_ = resume_from(group(), {state_.reducer.get()}, past.own);
  }

 private:
  static OptimizerState parsed(const Carried& common) {
    OptimizerState whole;
    try {
      for (const auto& [name, numbers] : common.values.items()) {
        whole[name].numbers = numbers.get<std::map<std::string, double>>();
      }
    } catch (const Json::exception&) {  // a file's content is not trusted
      throw CheckpointError(
          fmt::format("the state of LocalUpdates was not written by shoal: {}", common.values.dump()));
    }
    for (const auto& [key, tensor] : common.tensors) {
      const auto dot = key.rfind('.');
      if (dot != std::string::npos) whole[key.substr(0, dot)].tensors[key.substr(dot + 1)] = tensor;
    }
    return whole;
  }

  LocalUpdates& updates_;
  LocalUpdates::State& state_;
};

}  // namespace

std::shared_ptr<CheckpointSource> checkpoint_source(LocalUpdates& updates) {
  return std::make_shared<LocalUpdatesSource>(updates, *updates.state_);
}

}  // namespace shoal
