#pragma once
// Texts of errors.

#include <string>

#include "shoal/error.h"

namespace shoal::test {

// The message of the Error that `act` throws; other exceptions pass through.
template <class Error = UsageError, class Act>
std::string refusal(const Act& act) {
  try {
    act();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was refused";
}

}  // namespace shoal::test
