#pragma once
// Memory of a module between two strategies.

#include <torch/nn/module.h>

#include <string>
#include <vector>

#include "shoal/precision.h"

namespace shoal {

// Names the first parameter of which grad() holds something but zeros; empty: none. used: backward has used what lies
// behind gradients without memory. Parameters that shoal ignores are left out.
std::string parameter_with_gradient(const torch::nn::Module& module, const std::vector<std::string>& ignored,
                                    bool used);

// Prepares the module for the end of its strategy, which must still exist. Gradients are dropped. A parameter whose
// memory belongs to the strategy becomes deferred (DeferredInit), so that the strategy's end neither copies nor loses
// its values: the caller must have them. So does one whose dtype differs between the two precisions; buffers and
// ignored parameters are converted.
void release_module(const torch::nn::Module& module, const std::vector<std::string>& ignored, const Precision& from,
                    const Precision& to);

}  // namespace shoal
