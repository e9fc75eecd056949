// `shoal train --data reference --strategy ddp` against the results of the reference peers (tests/golden).

#include <gtest/gtest.h>

#include "tests/golden/compare.h"
#include "tests/support/processes.h"
#include "tests/support/temp_folder.h"

namespace shoal::test {
namespace {

// Trains as the golden run did, through `command`, and compares the results with it.
void expect_golden_results(const std::string& name, const Command& command) {
  const auto golden = golden::load(std::string(GOLDEN) + "/" + name + ".json");
  const auto& config = golden["config"];
  const auto number = [&](const char* name) { return std::to_string(config.at(name).get<int>()); };
  const TempFolder folder;
  auto train = command;
  const std::vector<std::string> options = {"--data",       "reference",
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
                                            "--json",       folder.file("report.json")};
  train.arguments.insert(train.arguments.end(), options.begin(), options.end());
  const auto ended = run_together({train}, 100).front();
  ASSERT_EQ(ended.code, 0) << ended.output;
  // Batch norm sees each rank's own batch, so the CNN's counterpart is the peer that does the same.
  const std::string peer = config.at("model") == "cnn" ? "ddp" : "single";
  for (const auto& line : golden::compare(golden::load(folder.file("report.json")), golden, peer))
    ADD_FAILURE() << line;
}

class Parity : public ::testing::TestWithParam<std::string> {};

TEST_P(Parity, DDP02_ddp_equals_the_golden_run) {
  expect_golden_results(GetParam(), {{SHOAL, "train"}, {}});
}

class ParityOverMpi : public ::testing::TestWithParam<std::string> {};

TEST_P(ParityOverMpi, DDP02_ddp_equals_the_golden_run) {
  if (std::string(MPIRUN).empty()) GTEST_SKIP() << "this build has no MPI";
  const auto world = GetParam().substr(GetParam().rfind("_w") + 2, 1);
  expect_golden_results(
      GetParam(), {{MPIRUN, "-n", world, SHOAL, "train", "--transport", "mpi"}, variables_of(MPIRUN_ENVIRONMENT)});
}

INSTANTIATE_TEST_SUITE_P(Golden, ParityOverMpi,
                         ::testing::Values("mlp_sgd_momentum_w2", "cnn_adamw_w3", "gpt_adamw_w2_accumulate3"),
                         [](const auto& info) { return info.param; });

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
