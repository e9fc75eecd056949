#pragma once
// Access to environment variables; nothing else reads them. Other code takes an Environment, so that tests can pass
// one.

#include <functional>
#include <optional>
#include <string>

namespace shoal {

// Looks up a variable; nothing if it is unset or empty.
using Environment = std::function<std::optional<std::string>(const std::string& name)>;

// The environment of this process.
Environment process_environment();

}  // namespace shoal
