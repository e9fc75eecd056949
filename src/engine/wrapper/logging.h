#pragma once
// Fills LoggingData.

#include "engine/reducer/reducer.h"
#include "module/walk.h"
#include "shoal/precision.h"
#include "shoal/telemetry.h"

namespace shoal {

// Whom it is about. The model follows.
LoggingData log_of(const std::string& strategy, const torch::nn::Module& module, const Group& group,
                   LoggingData::Settings settings);
// Several of them add up, as chunks of one model do.
void add_model(LoggingData& data, const ModuleTensors& tensors);
void add_steps(LoggingData& data, const Reducer& reducer);

// For settings.
std::string yes_or_no(bool value);
std::string in_words(const Precision& precision);

}  // namespace shoal
