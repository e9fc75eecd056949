#pragma once
// Errors of what PyTorch calls: hooks and nodes of a backward, and observers of operators. PyTorch carries them to
// whoever called it; a binding of another language may turn them into its own where they begin, since PyTorch's own
// binding knows no classes of shoal.

#include <exception>
#include <functional>

#include "shoal/error.h"

namespace shoal {

// Called with the error, on the thread where it was thrown. It may throw another instead; otherwise the error goes on.
using ErrorTranslator = std::function<void(const std::exception_ptr& error)>;

// Not thread-safe: set it before the first operator.
void set_error_translator(ErrorTranslator translator);
void translate_error(const std::exception_ptr& error);

// Runs what PyTorch has called.
template <class Act>
auto called_by_pytorch(const Act& act) {
  try {
    return act();
  } catch (const Error&) {
    translate_error(std::current_exception());
    throw;
  }
}

}  // namespace shoal
