#pragma once
// Learning-rate schedules of `shoal train`.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cli/train/train_options.h"
#include "shoal/schedules.h"

namespace shoal::cli {

std::vector<std::string> schedule_names();

// UsageError for options that the schedule lacks or does not accept and, if the number of steps is known, for those
// that do not fit it.
void check_schedule(const TrainOptions& options);

// Schedule for the optimizer's present rates; call its step() after each step. nullptr for "constant". UsageError for
// options that do not fit the number of steps.
std::unique_ptr<LambdaLR> make_schedule(const TrainOptions& options, torch::optim::Optimizer& optimizer,
                                        int64_t total_steps);

}  // namespace shoal::cli
