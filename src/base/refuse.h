#pragma once
// How a reader says that its input is bad: as the error of the layer that it reads for.

#include <string>

namespace shoal {

// Throws; does not return.
using Refuse = void (*)(const std::string& message);

template <class Error>
[[noreturn]] void refuse_as(const std::string& message) {
  throw Error(message);
}

}  // namespace shoal
