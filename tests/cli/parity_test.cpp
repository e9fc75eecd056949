// `shoal train --data reference --strategy ddp` against the results of the reference peers (tests/golden).

#include <gtest/gtest.h>

#include "tests/golden/compare.h"
#include "tests/support/processes.h"
#include "tests/support/temp_folder.h"

namespace shoal::test {
namespace {

class Parity : public ::testing::TestWithParam<std::string> {};

TEST_P(Parity, DDP02_ddp_equals_the_golden_run) {
  const auto golden = golden::load(std::string(GOLDEN) + "/" + GetParam() + ".json");
  const auto& config = golden["config"];
  const auto number = [&](const char* name) { return std::to_string(config.at(name).get<int>()); };
  const TempFolder folder;
  const auto ended = run({SHOAL,          "train",
                          "--data",       "reference",
                          "--strategy",   "ddp",
                          "--threads",    "1",
                          "--model",      config.at("model"),
                          "--size",       config.at("size"),
                          "--optimizer",  config.at("optimizer"),
                          "--ranks",      number("world"),
                          "--steps",      number("steps"),
                          "--batch",      number("batch"),
                          "--accumulate", number("accumulate"),
                          "--seed",       number("seed"),
                          "--json",       folder.file("report.json")},
                         100);
  ASSERT_EQ(ended.code, 0) << ended.output;
  // Batch norm sees each rank's own batch, so the CNN's counterpart is the peer that does the same.
  const std::string peer = config.at("model") == "cnn" ? "ddp" : "single";
  for (const auto& line : golden::compare(golden::load(folder.file("report.json")), golden, peer))
    ADD_FAILURE() << line;
}

std::vector<std::string> golden_runs() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(GOLDEN)) {
    if (entry.path().extension() == ".json") names.push_back(entry.path().stem());
  }
  std::sort(names.begin(), names.end());
  return names;
}

INSTANTIATE_TEST_SUITE_P(Golden, Parity, ::testing::ValuesIn(golden_runs()),
                         [](const auto& info) { return info.param; });

TEST(Parity, AllModelsOptimizersAndWorldsAreThere) {
  EXPECT_EQ(golden_runs().size(), 30U);
}

}  // namespace
}  // namespace shoal::test
