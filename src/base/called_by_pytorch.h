#pragma once
// Errors of hooks in backward. Autograd carries them to whoever called backward; a binding of another language may turn
// them into its own there, since autograd's own binding knows no classes of shoal.

#include <exception>
#include <functional>

#include "shoal/error.h"

namespace shoal {

// Called with the error, on the thread of the hook. It may throw another instead; otherwise the error goes on.
using AutogradErrorTranslator = std::function<void(const std::exception_ptr& error)>;

// Not thread-safe: set it before the first backward.
void set_autograd_error_translator(AutogradErrorTranslator translator);
void translate_autograd_error(const std::exception_ptr& error);

// Runs what autograd has called.
template <class Act>
void in_autograd(const Act& act) {
  try {
    act();
  } catch (const Error&) {
    translate_autograd_error(std::current_exception());
    throw;
  }
}

}  // namespace shoal
