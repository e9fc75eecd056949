#pragma once
// Device of a module before it is sharded.

#include <torch/nn/module.h>

#include <optional>
#include <string>
#include <vector>

namespace shoal {

// Moves a module from the CPU to `device`; one without index is the current one of its kind, with a warning. A module
// that is elsewhere already has to be on that device. UsageError if not, when its parameters are on several
// devices, and for a device that this process does not have. `ignored`: names of parameters and buffers that may be
// anywhere.
void place_module(torch::nn::Module& module, std::optional<at::Device> device, const std::vector<std::string>& ignored);

}  // namespace shoal
