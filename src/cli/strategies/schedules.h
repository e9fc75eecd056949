#pragma once
// The learning-rate schedules that `shoal train` knows.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cli/train/train_options.h"
#include "shoal/schedules.h"

namespace shoal::cli {

std::vector<std::string> schedule_names();

// Throws UsageError for options that the schedule needs or does not take, and where the number of steps is known, for
// those that do not fit it.
void check_schedule(const TrainOptions& options);

// On the optimizer's rates as they are now; step() it after each step. None for "constant". Throws UsageError for
// options that do not fit the number of steps.
std::unique_ptr<LambdaLR> make_schedule(const TrainOptions& options, torch::optim::Optimizer& optimizer,
                                        int64_t total_steps);

}  // namespace shoal::cli
