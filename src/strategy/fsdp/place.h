#pragma once
// Placement of a module on its device before it is sharded.

#include <torch/nn/module.h>

#include <optional>
#include <string>
#include <vector>

namespace shoal {

// Moves a module from the CPU to `device`. A device without an index means the current one of its type, with a warning.
// UsageError if the module is on another device, if its parameters are on several devices, or if this process does not
// have the device. ignored: names of parameters and buffers that may be anywhere.
void place_module(torch::nn::Module& module, std::optional<at::Device> device, const std::vector<std::string>& ignored);

}  // namespace shoal
