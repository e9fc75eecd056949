#pragma once
// Options of wrappers, from text.

#include "shoal/ddp.h"
#include "shoal/megatron.h"
#include "shoal/strategy.h"
#include "shoal/zero.h"

namespace shoal {

// The hook given in `options`, or one for the option compress. Each wrapper needs an object of its own.
std::shared_ptr<CommunicationHook> hook_of(const OptionValues& values, const TrainingOptions& options);
StrategyOption compress_option();
StrategyOption fp32_gradients_option(bool usual);
// StrategyOptionError for a hook that gives every rank whole sums, for a strategy whose ranks need parts.
void check_hook_of_parts(const std::string& strategy, const OptionValues& values);

// Strategies ddp and zero1.
std::vector<StrategyOption> ddp_option_list();
DistributedDataParallelOptions ddp_options(const OptionValues& values, const TrainingOptions& options);

std::vector<StrategyOption> zero2_option_list();
ShardedDataParallelOptions zero2_options(const OptionValues& values, const TrainingOptions& options);

std::vector<StrategyOption> megatron_option_list();
DistributedOptimizerOptions megatron_options(const OptionValues& values, const TrainingOptions& options);

}  // namespace shoal
