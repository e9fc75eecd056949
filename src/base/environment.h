#pragma once
// The only place that reads environment variables. Everything else takes an Environment, so that tests can pass one.

#include <functional>
#include <optional>
#include <string>

namespace shoal {

// Looks a variable up; no value when it is unset or empty.
using Environment = std::function<std::optional<std::string>(const std::string& name)>;

// The environment of this process.
Environment process_environment();

}  // namespace shoal
