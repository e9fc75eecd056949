#pragma once
// Registration of operators for good.

#include <torch/library.h>

#include <optional>

namespace shoal {

// Registers implementations for operators of `space` ("_": of all), as TORCH_LIBRARY_IMPL does, and never takes them
// back: tensors that need them may belong to a program's global objects, which are destroyed after the library's own.
// Keep the result ([[gnu::used]]), or it counts as a leak.
inline const torch::Library& permanent_library(const char* space, c10::DispatchKey key, void (*fill)(torch::Library&)) {
  auto* library = new torch::Library(torch::Library::IMPL, space, std::optional(key), __FILE__, __LINE__);
  fill(*library);
  return *library;
}

}  // namespace shoal
