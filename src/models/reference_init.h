#pragma once
// The parameters that every reference run starts from.

#include <torch/nn/module.h>

#include <cstdint>

namespace shoal::models {

// Fills float32 parameters on the CPU from the hash, numbered in named_parameters() order:
//   two dimensions or more   a * unit(draw(key(seed, 1, number), i)), a = float32(1 / sqrt(numel / shape[0]));
//   a norm's                 weight 1, bias 0;
//   any other bias           as the weight before it, with that weight's a.
// Buffers stay as they are.
void reference_init(torch::nn::Module& module, uint64_t seed);

}  // namespace shoal::models
