#pragma once
// Builder of LoggingData.

#include "engine/reducer/reducer.h"
#include "module/walk.h"
#include "shoal/hooks.h"
#include "shoal/precision.h"
#include "shoal/telemetry.h"

namespace shoal {

// LoggingData without the model and steps, which the functions below add.
LoggingData log_of(const std::string& strategy, const torch::nn::Module& module, const Group& group,
                   LoggingData::Settings settings);
// Repeated calls accumulate, for a model in several chunks.
void add_model(LoggingData& data, const ModuleTensors& tensors);
void add_steps(LoggingData& data, const Reducer& reducer);

// Texts of settings.
std::string yes_or_no(bool value);
std::string in_words(const Precision& precision);
// Its options; nullptr: "none".
std::string in_words(const GradScaler* scaler);
std::string in_words(const CommunicationHook* hook);
std::string in_words(const BufferHook* hook, BufferHookLocation location);

// DisagreeError that names an option of which ranks have other values, and these. Collective.
void agree_on_settings(const Group& group, const std::string& wrapper, const LoggingData::Settings& settings);

}  // namespace shoal
