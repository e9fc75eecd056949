#pragma once
// State of learning-rate schedules in checkpoints.

#include <torch/optim/schedulers/lr_scheduler.h>
#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>

#include <nlohmann/json.hpp>
#include <variant>

namespace shoal {

using Schedule = std::variant<torch::optim::LRScheduler*, torch::optim::ReduceLROnPlateauScheduler*>;

// Number of step() calls so far: LambdaLR's position.
int64_t steps_of(torch::optim::LRScheduler& schedule);
// A LambdaLR also sets its rates; other schedules continue from the optimizer's present rates.
void set_steps(torch::optim::LRScheduler& schedule, int64_t steps);

nlohmann::json state_of(const Schedule& schedule);
// Throws nlohmann::json's errors if `state` is not the state of such a schedule, before anything has changed.
void load_state(const Schedule& schedule, const nlohmann::json& state);

}  // namespace shoal
