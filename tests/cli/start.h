#pragma once
// Command lines that are refused, and runs that are short.

#include <gtest/gtest.h>

#include <algorithm>

#include "tests/cli/shoal_program.h"

namespace shoal::test::start {

using Line = std::vector<std::string>;

inline void expect_one_error(const Ended& ended, int code, const std::string& because) {
  EXPECT_EQ(ended.code, code) << ended.output;
  EXPECT_NE(ended.output.find(because), std::string::npos) << because << "\n" << ended.output;
  EXPECT_EQ(std::count(ended.output.begin(), ended.output.end(), '\n'), 1) << "one line: " << ended.output;
}

inline void expect_refused(const Line& line, const std::string& because) {
  expect_one_error(shoal(line), 2, because);
}

inline Line reference(const Line& more) {
  Line line{"train", "--data", "reference", "--model", "mlp", "--steps", "2"};
  line.insert(line.end(), more.begin(), more.end());
  return line;
}

}  // namespace shoal::test::start
