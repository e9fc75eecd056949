#pragma once
// Initial parameters of every reference run.

#include <torch/nn/module.h>

#include <cstdint>

namespace shoal::models {

// Fills float32 parameters on the CPU from the hash, numbered in named_parameters() order:
//   two dimensions or more   a * unit(draw(key(seed, 1, number), i)), a = float32(1 / sqrt(numel / shape[0]));
//   in a norm                weight 1, bias 0;
//   any other bias           as for the preceding weight, with that weight's a.
// Buffers are not changed.
void reference_init(torch::nn::Module& module, uint64_t seed);

}  // namespace shoal::models
