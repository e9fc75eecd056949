#pragma once
// Registry of the built-in models, by name and size.

#include <c10/core/ScalarType.h>

#include <string>
#include <vector>

#include "models/gpt.h"
#include "models/model.h"

namespace shoal::models {

enum class Init {
  torch,      // libtorch's own, with a standard deviation of 0.02 for GPT's embeddings
  reference,  // from the hash; see reference_init.h
};

// Names in the order of the help text.
std::vector<std::string> model_names();
// Sizes of a model, smallest first. UsageError, which lists the choices, for an unknown name.
std::vector<std::string> model_sizes(const std::string& name);

// UsageError, which lists the choices, for an unknown name or size.
void require_model(const std::string& name, const std::string& size);

// A model on the CPU with floating-point tensors of `dtype`. The same arguments give the same model; the default random
// generator is not changed. UsageError, which lists the choices, for an unknown name or size.
std::shared_ptr<Model> make_model(const std::string& name, const std::string& size, Init init, uint64_t seed,
                                  at::ScalarType dtype = at::kFloat);

// Configuration of the model "gpt". UsageError for an unknown size.
GptConfig gpt_config(const std::string& size);

}  // namespace shoal::models
