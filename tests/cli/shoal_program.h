// The shoal program, as a user starts it.
#pragma once

#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/support/processes.h"

namespace shoal::test {

inline Ended shoal(std::vector<std::string> arguments, double limit_seconds = 100) {
  arguments.insert(arguments.begin(), SHOAL);
  return run(arguments, limit_seconds);
}

inline nlohmann::json read(const std::string& path) {
  std::ifstream file(path);
  return nlohmann::json::parse(file);
}

}  // namespace shoal::test
