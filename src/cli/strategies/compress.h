#pragma once
// `shoal train --compress`.

#include <memory>
#include <string>

#include "shoal/hooks.h"

namespace shoal::cli {

// none (no hook), fp16, bf16, int8, powersgd:RANK[:START] (from step START on, default 10), topk:FRACTION. UsageError
// for anything else.
std::shared_ptr<CommunicationHook> make_hook(const std::string& text);
// The same from its first compressed step on.
std::shared_ptr<CommunicationHook> make_started_hook(const std::string& text);
// Steps before that, in which gradients travel whole.
int64_t plain_steps(const std::string& text);

}  // namespace shoal::cli
