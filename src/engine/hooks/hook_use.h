#pragma once
// Wrappers that use a communication hook.

#include <torch/nn/module.h>

#include <memory>
#include <string>

#include "shoal/hooks.h"

namespace shoal {

// The hook as a wrapper of this module holds it: it is in use while a copy of the pointer lives. nullptr stays nullptr.
// UsageError on all ranks if it, or a carrier of it, has memory and another wrapper of some rank uses it. A wrapper of
// the same module may, too: the old one still lives while a program replaces it (model = DistributedDataParallel(...)).
// wrapper: class, for errors. Collective over `group`, all of whose ranks have a hook, or none.
std::shared_ptr<CommunicationHook> in_use_by(const std::string& wrapper, const torch::nn::Module& module,
                                             const Group& group, const std::shared_ptr<CommunicationHook>& hook);

// Whether a wrapper uses it, or a carrier of it, and it has memory.
bool is_in_use(const CommunicationHook& hook);

}  // namespace shoal
