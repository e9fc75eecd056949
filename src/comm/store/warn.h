#pragma once
// Warnings for people. TORCH_WARN is not seen in a job: quiet_c10d() silences libtorch's log.

#include <c10/util/Exception.h>

#include <string>
#include <typeinfo>

#include "base/print_to_stderr.h"

namespace shoal {

// On standard error, unless the program has a handler of its own for libtorch's warnings.
inline void warn(const std::string& text) {
  const auto& handler = *c10::WarningUtils::get_warning_handler();
  if (typeid(handler) == typeid(c10::WarningHandler)) return print_to_stderr("shoal: {}\n", text);
  TORCH_WARN(text);
}

}  // namespace shoal
