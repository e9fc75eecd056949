#pragma once
// Communication hooks from text: the option `compress`.

#include <cstdint>
#include <memory>
#include <string>

#include "shoal/hooks.h"

namespace shoal {

// none (no hook), fp16, bf16, int8, powersgd:RANK[:START] (from step START on, default 10), topk:FRACTION.
// StrategyOptionError for other texts.
std::shared_ptr<CommunicationHook> make_hook(const std::string& text);
// The same hook, compressing from its first step on.
std::shared_ptr<CommunicationHook> make_started_hook(const std::string& text);
// Number of steps before compression starts.
int64_t plain_steps(const std::string& text);

}  // namespace shoal
