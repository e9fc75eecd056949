#pragma once
// State of learning-rate schedules, for checkpoints.

#include <torch/optim/schedulers/lr_scheduler.h>
#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>

#include <nlohmann/json.hpp>
#include <variant>

namespace shoal {

using Schedule = std::variant<torch::optim::LRScheduler*, torch::optim::ReduceLROnPlateauScheduler*>;

// Calls of step() so far: LambdaLR's position.
int64_t steps_of(torch::optim::LRScheduler& schedule);
// A LambdaLR sets its rates too; others count on from the rates that the optimizer has.
void set_steps(torch::optim::LRScheduler& schedule, int64_t steps);

nlohmann::json state_of(const Schedule& schedule);
// Json's errors for what is not the state of such a schedule; nothing has changed then.
void load_state(const Schedule& schedule, const nlohmann::json& state);

}  // namespace shoal
