// `shoal train --optimizer-in-backward` (DDP18).

#include <gmock/gmock.h>

#include "tests/cli/shoal_program.h"

namespace shoal::test::in_backward_test {
namespace {

using ::testing::HasSubstr;

std::vector<std::string> with(std::vector<std::string> options, const std::vector<std::string>& more) {
  options.insert(options.begin(), {"--data", "reference", "--steps", "4", "--ranks", "2"});
  options.insert(options.end(), more.begin(), more.end());
  return options;
}

TEST(Train, DDP18_updates_inside_backward_are_those_after_it) {
  const std::vector<std::vector<std::string>> runs{{"--model", "gpt"},
                                                   {"--model", "cnn", "--accumulate", "3"},
                                                   {"--model", "mlp", "--clip", "0.1"},
                                                   {"--model", "mlp", "--dtype", "fp16_mixed"},
                                                   {"--model", "mlp", "--compress", "bf16"},
                                                   {"--model", "mlp", "--schedule", "cosine", "--warmup-steps", "2"}};
  for (const auto& options : runs) {
    const auto after = train(with(options, {}));
    const auto inside = train(with(options, {"--optimizer-in-backward"}));
    ASSERT_FALSE(after.is_null() || inside.is_null());
    EXPECT_EQ(inside["loss"], after["loss"]) << options[1];
    EXPECT_EQ(inside["params"], after["params"]) << "to the last bit: " << options[1];
    EXPECT_EQ(inside["memory"]["grads_mib"], 0) << "they have gone";
    EXPECT_GT(after["memory"]["grads_mib"], 0);
  }
}

TEST(Train, BEY07_what_to_clip_by_is_a_choice) {
  const std::vector<std::string> options{"--model",           "mlp", "--clip", "0.1", "--bucket-cap-mb", "0.01",
                                         "--first-bucket-mb", "0.01"};
  const auto exact = train(with(options, {"--optimizer-in-backward", "exact"}));
  for (const auto* choice : {"stale", "per_bucket"}) {
    const auto other = train(with(options, {"--optimizer-in-backward", choice}));
    EXPECT_EQ(other["loss"].size(), 4U);
    EXPECT_NE(other["params"], exact["params"]) << choice;
  }
}

TEST(Train, DDP18_goes_on_from_a_checkpoint_with_its_loss_scale) {
  const TempFolder folder;
  const std::vector<std::string> options{"train",   "--data", "reference", "--model",    "mlp",
                                         "--ranks", "2",      "--dtype",   "fp16_mixed", "--optimizer-in-backward",
                                         "exact"};
  const auto line = [&](const std::vector<std::string>& more) {
    auto all = options;
    all.insert(all.end(), more.begin(), more.end());
    const auto ended = shoal(all);
    EXPECT_EQ(ended.code, 0) << ended.output;
  };
  line({"--steps", "6", "--json", folder.file("whole.json")});
  line({"--steps", "3", "--save", folder.file("run")});
  line({"--steps", "6", "--resume", folder.file("run"), "--json", folder.file("resumed.json")});
  EXPECT_EQ(read(folder.file("resumed.json"))["params"], read(folder.file("whole.json"))["params"]);
}

TEST(Train, DDP18_strategies_that_cannot_are_refused) {
  for (const auto* strategy : {"zero1", "zero2", "megatron", "fsdp", "decentralized", "diloco", "none", "local"}) {
    const auto ended = shoal({"train", "--data", "reference", "--strategy", strategy, "--optimizer-in-backward"});
    EXPECT_EQ(ended.code, 2) << ended.output;
    EXPECT_THAT(ended.output, HasSubstr("--optimizer-in-backward: " + std::string(strategy) + " does not have it"));
    EXPECT_THAT(ended.output, HasSubstr("it is for ddp"));
  }
  const auto ended = shoal({"train", "--data", "reference", "--optimizer-in-backward", "sometimes"});
  EXPECT_EQ(ended.code, 2) << ended.output;
  EXPECT_THAT(ended.output, HasSubstr("--optimizer-in-backward sometimes"));
}

}  // namespace
}  // namespace shoal::test::in_backward_test
