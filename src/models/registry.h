#pragma once
// The built-in models by name and size.

#include <c10/core/ScalarType.h>

#include <string>
#include <vector>

#include "models/gpt.h"
#include "models/model.h"

namespace shoal::models {

enum class Init {
  torch,      // libtorch's own, with GPT's embeddings at a standard deviation of 0.02
  reference,  // from the hash, see reference_init.h
};

// Names in the order of a help text.
std::vector<std::string> model_names();
// Sizes of a model, smallest first. Throws UsageError, listing the choices, for an unknown name.
std::vector<std::string> model_sizes(const std::string& name);

// Throws UsageError, listing the choices, for an unknown name or size.
void require_model(const std::string& name, const std::string& size);

// A model on the CPU with floating-point tensors of `dtype`, equal on every call with the same arguments; the default
// random generator is left as it was. Throws UsageError, listing the choices, for an unknown name or size.
std::shared_ptr<Model> make_model(const std::string& name, const std::string& size, Init init, uint64_t seed,
                                  at::ScalarType dtype = at::kFloat);

// Of the model "gpt". Throws UsageError for an unknown size.
GptConfig gpt_config(const std::string& size);

}  // namespace shoal::models
