#pragma once
// Errors of readers of untrusted input, thrown as the exception type of the layer that they read for.

#include <string>

namespace shoal {

// Throws; does not return.
using Refuse = void (*)(const std::string& message);

template <class Error>
[[noreturn]] void refuse_as(const std::string& message) {
  throw Error(message);
}

}  // namespace shoal
