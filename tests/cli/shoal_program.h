// The shoal program, started as a user starts it.
#pragma once

#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/support/processes.h"
#include "tests/support/temp_folder.h"
#include "tests/support/warm_program.h"

namespace shoal::test {

#ifdef WARM_START
inline const bool warmed = (warm_up(SHOAL, WARM_START), true);
#endif

inline Ended shoal(std::vector<std::string> arguments, double limit_seconds = 100) {
  arguments.insert(arguments.begin(), SHOAL);
  return run(arguments, limit_seconds);
}

inline nlohmann::json read(const std::string& path) {
  std::ifstream file(path);
  return nlohmann::json::parse(file);
}

// Report of `shoal train` with these options; null, and a test failure, if the run failed.
inline nlohmann::json train(const std::vector<std::string>& options) {
  const TempFolder folder;
  std::vector<std::string> line{"train", "--json", folder.file("report.json")};
  line.insert(line.end(), options.begin(), options.end());
  const auto ended = shoal(line);
  EXPECT_EQ(ended.code, 0) << ended.output;
  return ended.code == 0 ? read(folder.file("report.json")) : nlohmann::json();
}

}  // namespace shoal::test
