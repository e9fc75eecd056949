// `shoal train --data reference` against the results of the reference peers (tests/golden).

#include <gtest/gtest.h>

#include "tests/cli/shoal_program.h"
#include "tests/golden/compare.h"
#include "tests/support/processes.h"
#include "tests/support/temp_folder.h"

namespace shoal::test::parity_test {
namespace {

// Report of a run with the golden run's settings, through `command`.
nlohmann::json train_as(const nlohmann::json& config, const std::string& strategy, const Command& command) {
  const auto number = [&](const char* name) { return std::to_string(config.at(name).get<int>()); };
  const TempFolder folder;
  auto train = command;
  const std::vector<std::string> options = {
      "--data",       "reference",          "--strategy", strategy,          "--threads",   "1",
      "--model",      config.at("model"),   "--size",     config.at("size"), "--optimizer", config.at("optimizer"),
      "--ranks",      number("world"),      "--steps",    number("steps"),   "--batch",     number("batch"),
      "--accumulate", number("accumulate"), "--seed",     number("seed"),    "--json",      folder.file("report.json")};
  train.arguments.insert(train.arguments.end(), options.begin(), options.end());
  const auto ended = run_together({train}, 100).front();
  EXPECT_EQ(ended.code, 0) << ended.output;
  return ended.code == 0 ? golden::load(folder.file("report.json")) : nlohmann::json();
}

void expect_golden_results(const std::string& name, const std::string& strategy, const Command& command) {
  const auto golden = golden::load(std::string(GOLDEN) + "/" + name + ".json");
  const auto& config = golden["config"];
  const auto report = train_as(config, strategy, command);
  ASSERT_FALSE(report.is_null());
  // Batch norm sees each rank's own batch, so that the CNN is compared with the peer that does the same.
  const std::string peer = config.at("model") == "cnn" ? "ddp" : "single";
  for (const auto& line : golden::compare(report, golden, peer)) ADD_FAILURE() << line;
}

class Parity : public ::testing::TestWithParam<std::string> {};

TEST_P(Parity, DDP02_ddp_equals_the_golden_run) {
  expect_golden_results(GetParam(), "ddp", {{SHOAL, "train"}, {}});
}

class ParityOverMpi : public ::testing::TestWithParam<std::string> {};

TEST_P(ParityOverMpi, DDP02_ddp_equals_the_golden_run) {
  if (std::string(MPIRUN).empty()) GTEST_SKIP() << "this build has no MPI";
  const auto world = GetParam().substr(GetParam().rfind("_w") + 2, 1);
  expect_golden_results(
      GetParam(), "ddp",
      {{MPIRUN, "-n", world, SHOAL, "train", "--transport", "mpi"}, variables_of(MPIRUN_ENVIRONMENT)});
}

INSTANTIATE_TEST_SUITE_P(Golden, ParityOverMpi,
                         ::testing::Values("mlp_sgd_momentum_w2", "cnn_adamw_w3", "gpt_adamw_w2_accumulate3"),
                         [](const auto& info) { return info.param; });

class ParityOfStrategies : public ::testing::TestWithParam<std::tuple<std::string, std::string>> {};

TEST_P(ParityOfStrategies, OSS01_SDP12_MEG07_sharded_strategies_equal_the_golden_run) {
  const auto& [strategy, name] = GetParam();
  expect_golden_results(name, strategy, {{SHOAL, "train"}, {}});
}

INSTANTIATE_TEST_SUITE_P(Golden, ParityOfStrategies,
                         ::testing::Combine(::testing::Values("zero1", "zero2", "megatron", "fsdp"),
                                            ::testing::Values("mlp_adamw_w1", "mlp_sgd_momentum_w4",
                                                              "gpt_adamw_w2_accumulate3", "gpt_sgd_momentum_w3",
                                                              "gpt_adamw_w4")),
                         [](const auto& info) { return std::get<0>(info.param) + "_" + std::get<1>(info.param); });

// Losses to 0.5 %: bfloat16 has 8 bits, and CPUs differ in how they round its products.
TEST(Parity, bf16_mixed_follows_the_python_peers_losses) {
  const auto golden = golden::load(std::string(GOLDEN) + "/bf16/gpt_adamw_w2.json");
  for (const auto& [strategy, peer] : std::vector<std::pair<std::string, std::string>>{
           {"ddp", "single"}, {"zero2", "single"}, {"megatron", "megatron"}, {"fsdp", "fsdp2_full"}}) {
    const auto report = train_as(golden["config"], strategy, {{SHOAL, "train", "--dtype", "bf16_mixed"}, {}});
    ASSERT_FALSE(report.is_null());
    const auto& want = golden["peers"][peer]["loss"];
    ASSERT_EQ(report["loss"].size(), want.size());
    for (size_t step = 0; step < want.size(); ++step) {
      EXPECT_NEAR(report["loss"][step].get<double>(), want[step].get<double>(), 0.005 * want[step].get<double>())
          << strategy << " step " << step;
    }
  }
}

TEST(Parity, DDP12_bf16_mixed_is_within_2_percent_of_float32) {
  const auto losses = [](const std::string& dtype) -> std::vector<double> {
    return train({"--data", "reference", "--model", "gpt", "--size", "tiny", "--ranks", "2", "--steps", "30", "--dtype",
                  dtype})["loss"];
  };
  const auto exact = losses("float32"), rounded = losses("bf16_mixed");
  ASSERT_EQ(exact.size(), rounded.size());
  EXPECT_NE(exact, rounded);
  for (size_t step = 0; step < exact.size(); ++step) {
    EXPECT_NEAR(rounded[step], exact[step], 0.02 * exact[step]) << "step " << step;
  }
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

TEST(Parity, all_models_optimizers_and_worlds_are_there) {
  EXPECT_EQ(golden_runs().size(), 30U);
}

}  // namespace
}  // namespace shoal::test::parity_test
