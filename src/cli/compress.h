#pragma once
// `shoal train --compress`.

#include <memory>
#include <string>

#include "shoal/engine/communication_hook.h"

namespace shoal::cli {

// none (no hook), fp16, bf16, int8, powersgd:RANK[:START] (from step START on, default 10), topk:FRACTION. UsageError
// for anything else.
std::shared_ptr<CommunicationHook> make_hook(const std::string& text);

}  // namespace shoal::cli
