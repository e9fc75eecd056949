// The optimizers and schedules of `shoal train`.

#include <gtest/gtest.h>

#include <cmath>

#include "tests/cli/shoal_program.h"
#include "tests/support/temp_folder.h"

namespace shoal::test::optimizers_test {
namespace {

using nlohmann::json;

// Optimizer state in units of the parameters' memory.
TEST(Train, every_optimizer_learns_and_keeps_what_it_should) {
  const std::vector<std::tuple<std::string, double, double>> optimizers{
      {"adamw", 2, 2},   {"adam", 2, 2},       {"sgd", 0, 0},        {"sgd_momentum", 1, 1},
      {"adagrad", 1, 1}, {"rmsprop", 1, 1},    {"lamb", 2, 2},       {"adafactor", 0, 0.5},
      {"muon", 1, 1},    {"accum_adam", 3, 3}, {"accum_adamw", 3, 3}};
  for (const auto& [name, least, most] : optimizers) {
    const TempFolder folder;
    const auto ended = shoal({"train", "--data", "reference", "--model", "mlp", "--steps", "30", "--ranks", "1",
                              "--strategy", "none", "--optimizer", name, "--json", folder.file("report.json")});
    ASSERT_EQ(ended.code, 0) << name << ": " << ended.output;
    const auto report = read(folder.file("report.json"));
    EXPECT_LT(report["loss"].back().get<double>(), report["loss"].front().get<double>()) << name;
    const double kept = report["memory"]["state_mib"].get<double>() / report["memory"]["params_mib"].get<double>();
    EXPECT_GE(kept, least - 0.02) << name;
    EXPECT_LE(kept, most + 0.02) << name;
  }
}

json train_reference(const std::vector<std::string>& options) {
  const TempFolder folder;
  std::vector<std::string> line{"train", "--data", "reference", "--ranks", "2", "--json", folder.file("report.json")};
  line.insert(line.end(), options.begin(), options.end());
  const auto ended = shoal(line);
  EXPECT_EQ(ended.code, 0) << ended.output;
  return ended.code == 0 ? read(folder.file("report.json")) : json();
}

TEST(Train, schedules_set_the_rate_of_every_step) {
  const std::vector<std::tuple<std::vector<std::string>, std::vector<double>>> schedules{
      {{}, {0.8, 0.8, 0.8, 0.8, 0.8, 0.8}},
      {{"--schedule", "linear_warmup", "--warmup-steps", "2"}, {0.0008, 0.4004, 0.8, 0.8, 0.8, 0.8}},
      {{"--schedule", "cosine", "--warmup-steps", "2"},
       {0.0008, 0.4004, 0.8, 0.4 * (1 + std::sqrt(0.5)), 0.4, 0.4 * (1 - std::sqrt(0.5))}},
      {{"--schedule", "one_cycle", "--warmup-steps", "1"},
       {0.032, 0.8, 0.4 * (1 + std::sqrt(0.5)), 0.4, 0.4 * (1 - std::sqrt(0.5)), 3.2e-6}},
      {{"--schedule", "step", "--decay-every", "2", "--decay-factor", "0.5"}, {0.8, 0.8, 0.4, 0.4, 0.2, 0.2}}};
  for (const auto& [options, expected] : schedules) {
    std::vector<std::string> line{"--model", "mlp", "--steps", "6", "--optimizer", "sgd", "--lr", "0.8"};
    line.insert(line.end(), options.begin(), options.end());
    const auto report = train_reference(line);
    ASSERT_EQ(report["lr"].size(), expected.size());
    for (size_t step = 0; step < expected.size(); ++step) {
      EXPECT_NEAR(report["lr"][step].get<double>(), expected[step], 1e-4)
          << report["config"]["schedule"] << " " << step;
    }
  }
}

TEST(Train, DEC15_accum_iter_reaches_the_optimizer_under_every_strategy) {
  const auto train = [](std::vector<std::string> more) {
    for (const auto* option : {"--model", "gpt", "--steps", "5", "--optimizer", "accum_adamw"}) more.push_back(option);
    return train_reference(more);
  };
  const auto usual = train({"--strategy", "ddp"}), two = train({"--strategy", "ddp", "--accum-iter", "2"});
  EXPECT_EQ(train({"--strategy", "ddp", "--accum-iter", "4"})["params"], usual["params"]) << "the default";
  EXPECT_NE(two["params"], usual["params"]);
  EXPECT_EQ(two["config"]["accum_iter"], 2);
  for (const auto* strategy : {"zero1", "zero2", "megatron", "fsdp"}) {
    EXPECT_EQ(train({"--strategy", strategy, "--accum-iter", "2"})["params"], two["params"]) << strategy;
  }
}

// The rate reaches all updates, on whichever rank and for whichever pieces.
TEST(Train, schedules_and_muon_do_the_same_under_every_strategy) {
  for (const auto* optimizer : {"adamw", "muon"}) {
    const std::vector<std::string> common{"--model", "gpt", "--steps", "5", "--clip", "0.5", "--optimizer", optimizer};
    const auto train = [&](std::vector<std::string> more) {
      more.insert(more.end(), common.begin(), common.end());
      return train_reference(more)["params"];
    };
    const auto constant = train({"--strategy", "ddp"});
    const auto scheduled = train({"--strategy", "ddp", "--schedule", "cosine", "--warmup-steps", "2"});
    EXPECT_NE(constant, scheduled);
    for (const auto* strategy : {"zero1", "zero2", "megatron", "fsdp"}) {
      EXPECT_EQ(train({"--strategy", strategy, "--schedule", "cosine", "--warmup-steps", "2"}), scheduled)
          << strategy << " " << optimizer;
    }
  }
}

}  // namespace
}  // namespace shoal::test::optimizers_test
