// Loading of what a checkpoint has beside tensors: loss scale, options of param groups, schedules, random numbers.

#include <ATen/Context.h>
#include <fmt/format.h>
#include <torch/utils.h>

#include "engine/checkpoint/loader.h"
#include "engine/checkpoint/names.h"
#include "engine/checkpoint/parsed_entry.h"
#include "optim/named_options.h"
#include "shoal/error.h"

namespace shoal {

namespace names = checkpoint_names;
using Json = nlohmann::json;

const Json* TrainingLoader::shared_entry(const char* name) const {
  const auto& index = reader_.index();
  const auto find = [&](const Json& state) {
    const auto entry = state.find(name);
    return entry == state.end() ? nullptr : &*entry;
  };
  if (const auto* entry = find(index.global_state)) return entry;
  return index.rank_states.empty() ? nullptr : find(index.rank_states.at(exact_ ? rank_ : 0));
}

void TrainingLoader::restore(GradScaler* scaler) {
  const auto* entry = shared_entry(names::scaler);
  if ((entry != nullptr) != (scaler != nullptr)) {
    differences_.emplace_back(entry != nullptr
                                  ? "the checkpoint has the state of a loss scaler, which this training has not"
                                  : "the checkpoint has no state of a loss scaler; the scaler keeps its initial state");
    return;
  }
  if (entry == nullptr) return;
  scaler->load(parsed_entry(reader_, names::scaler, [&] {
    return GradScalerState{.scale = entry->at("scale").get<double>(),
                           .good_steps = entry->at("good_steps").get<int64_t>(),
                           .hysteresis_left = entry->at("hysteresis_left").get<int64_t>()};
  }));
}

void TrainingLoader::read_options() {
  const auto* entry = shared_entry(names::param_groups);
  if (entry == nullptr) return;
  parsed_entry(reader_, names::param_groups, [&] {
    param_groups_.emplace(view_, *entry);
    return 0;
  });
}

// For checkpoints written before param groups' options were saved.
void TrainingLoader::restore_rates() {
  const auto& global = reader_.index().global_state;
  if (param_groups_ || view_.optimizers.empty()) return;
  if (!global.contains(names::rates)) {
    differences_.emplace_back("the checkpoint has no options of param groups; they keep theirs");
    return;
  }
  const auto rates =
      parsed_entry(reader_, names::rates, [&] { return global[names::rates].get<std::vector<double>>(); });
  differences_.emplace_back("the checkpoint has no options of param groups but learning rates; they keep the others");
  for (auto* optimizer : view_.optimizers) {
    auto& groups = optimizer->param_groups();
    if (rates.size() != groups.size()) {
      differences_.push_back(fmt::format("the checkpoint has rates of {} param groups, here are {}; they keep theirs",
                                         rates.size(), groups.size()));
      continue;
    }
    for (size_t i = 0; options_.rates && i < groups.size(); ++i) {
      groups[i].options().set_lr(rates[i]);
    }
  }
}

void TrainingLoader::restore(const std::vector<Schedule>& companions) {
  const auto& global = reader_.index().global_state;
  const auto* states = shared_entry(names::schedules);
  const bool has_steps = global.contains(names::schedule);
  const auto steps = [&] {
    return parsed_entry(reader_, names::schedule, [&] { return global[names::schedule].get<int64_t>(); });
  };
  const auto starts_anew = [&](const char* which) {
    differences_.push_back(fmt::format("the checkpoint has no state of {}, which keeps its initial state", which));
  };
  for (auto* schedule : view_.schedules) {
    if (has_steps) set_steps(*schedule, steps());
  }
  // Older checkpoints have the steps of a LambdaLR only. Others begin with those of their rank, if its state was
  // loaded.
  const bool has_own_steps = exact_ && !view_.schedules.empty() && steps_of(*view_.schedules.front()) > 0;
  if (!view_.schedules.empty() && !has_steps && !has_own_steps) starts_anew("the strategy's schedule");
  const auto stored = states != nullptr && states->is_array() ? states->size() : 0;
  for (size_t i = 0; i < companions.size(); ++i) {
    auto* const* counting = std::get_if<torch::optim::LRScheduler*>(&companions[i]);
    if (i < stored && (*states)[i].contains("steps") == (counting != nullptr)) {
      parsed_entry(reader_, names::schedules, [&] {
        load_state(companions[i], (*states)[i]);
        return 0;
      });
    } else if (counting != nullptr && has_steps && stored == 0) {
      set_steps(**counting, steps());
    } else {
      starts_anew(counting != nullptr ? "a schedule" : "a ReduceLROnPlateauScheduler");
    }
  }
  if (stored > companions.size() || (has_steps && companions.empty() && view_.schedules.empty())) {
    differences_.push_back(fmt::format("the checkpoint has the state of {} schedules, this training {}: see with()",
                                       std::max<size_t>(stored, 1), companions.size()));
  }
}

void TrainingLoader::restore_random_numbers() const {
  if (reader_.index().world_size != ranks_) return;
  for (const auto& device : devices_of(view_)) {
    const auto name = names::of_rank(rank_, random_name(device));
    if (!reader_.has(name, names::ranks_part)) continue;
    auto generator = at::globalContext().defaultGenerator(device);
    const auto state = reader_.read(name);
    const std::lock_guard lock(generator.mutex());
    generator.set_state(state);
  }
}

void TrainingLoader::finish(const Companions& companions) {
  if (model_only()) return;
  note_common();
  for (auto& [place, state] : fresh_) {
    auto& states = place.first->state();
    if (state) {
      states[place.second] = std::move(state);
    } else {
      reset_state(*place.first, place.second);
    }
  }
  fresh_.clear();
  restore(view_.scaler != nullptr ? view_.scaler : companions.scaler);
  if (param_groups_) param_groups_->apply(options_.rates, options_.options);
  for (const auto& share : view_.shares) {
    if (share.local != nullptr) complete_states(*share.local);
  }
  restore_rates();
  restore(companions.schedules);  // sets the learning rates again
  restore_random_numbers();
}

}  // namespace shoal
