#pragma once
// Hash data of the reference runs: any sample of any step and rank, without files.

#include <cstdint>
#include <string>
#include <vector>

#include "data/dataset.h"

namespace shoal::data {

// Identifies a sample; step, rank and sample count from 0.
struct SampleId {
  uint64_t seed = 1;
  uint64_t step = 0;
  uint64_t rank = 0;
  uint64_t sample = 0;
};

struct Image {
  std::vector<float> pixels;  // 784 in [-1, 1): half the label's template, half noise
  int64_t label;              // 0 .. 9
};

Image reference_image(const SampleId& id);

// context + 1 bytes of a noisy chain: the inputs, and shifted by one the targets.
std::vector<int64_t> reference_text(const SampleId& id, int64_t context);

// Identifies a batch of a run.
struct BatchId {
  uint64_t seed = 1;
  uint64_t step = 0;
  uint64_t rank = 0;
  uint64_t micro = 0;  // micro-batch of the step
};

// Samples micro * count .. micro * count + count - 1 for a model of models::make_model. For images: inputs `dtype`
// [count, 784] and int64 labels [count]; for gpt: both int64 [count, context]. UsageError for an unknown model or size.
Batch reference_batch(const std::string& model, const std::string& size, const BatchId& id, int64_t count,
                      at::ScalarType dtype = at::kFloat);

}  // namespace shoal::data
