#pragma once
// Names of tensors in several model chunks.

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

namespace shoal {

using Chunks = std::vector<std::shared_ptr<torch::nn::Module>>;

// What names of the chunk `number` begin with: "chunk1.", or nothing where there is one chunk.
std::string chunk_prefix(const Chunks& chunks, size_t number);

// The names that each chunk is to ignore. One without prefix counts in every chunk that has it. UsageError for a name
// that no chunk has, and for chunks that are missing.
std::vector<std::vector<std::string>> ignored_by_chunk(const Chunks& chunks, const std::vector<std::string>& ignored);

// UsageError when a trainable parameter is in two chunks and ignored in neither.
void require_separate(const Chunks& chunks, const std::vector<std::vector<std::string>>& ignored);

}  // namespace shoal
