// `shoal completion`: what bash offers, asked of bash itself.

#include <gmock/gmock.h>

#include <algorithm>
#include <map>
#include <sstream>

#include "tests/cli/shoal_program.h"

namespace shoal::test::completion_test {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Not;

// What bash would offer for the last word.
std::vector<std::string> offered(const std::vector<std::string>& words) {
  std::string program = "source <(" SHOAL " completion bash)\nCOMP_WORDS=(";
  for (const auto& word : words) program += "'" + word + "' ";
  program += ")\nCOMP_CWORD=" + std::to_string(words.size() - 1) + "\n_shoal\nprintf '%s\\n' \"${COMPREPLY[@]}\"\n";
  const auto ended = run({"/bin/bash", "-c", program}, 60);
  EXPECT_EQ(ended.code, 0) << ended.output;
  std::vector<std::string> offers;
  std::istringstream lines(ended.output);
  for (std::string line; std::getline(lines, line);) {
    if (!line.empty()) offers.push_back(line);
  }
  return offers;
}

TEST(Completion, bash_offers_commands_options_and_values) {
  EXPECT_THAT(offered({"shoal", ""}), AllOf(Contains("train"), Contains("top"), Contains("report"),
                                            Contains("completion"), Contains("doctor")));
  EXPECT_THAT(offered({"shoal", "che"}), ElementsAre("checkpoint"));
  EXPECT_THAT(offered({"shoal", "checkpoint", ""}), ElementsAre("inspect", "verify", "export", "reshard"));
  EXPECT_THAT(offered({"shoal", "train", "--strat"}), ElementsAre("--strategy"));
  EXPECT_THAT(offered({"shoal", "train", "--strategy", "zer"}), ElementsAre("zero1", "zero2"));
  EXPECT_THAT(offered({"shoal", "train", "--eval", "--dtype", "bf16"}), ElementsAre("bf16_mixed", "bf16", "bf16_pure"));
  EXPECT_THAT(offered({"shoal", "trace", "merge", "traces", "--out"}), ElementsAre("--output"));
  EXPECT_THAT(offered({"shoal", "topology", "one-peer-e"}), Contains("one-peer-exp"));
  EXPECT_THAT(offered({"shoal", "train", "--model", "mlp", "-"}), AllOf(Contains("--help"), Not(Contains("--html"))));
}

TEST(Completion, bash_offers_values_that_the_command_takes) {
  EXPECT_THAT(offered({"shoal", "plan", "--strategy", ""}),
              AllOf(Contains("all"), Contains("hybrid"), Not(Contains("none")), Not(Contains("local_sgd"))));
  EXPECT_THAT(offered({"shoal", "bench", "--strategies", ""}), AllOf(Contains("ddp"), Not(Contains("none"))));
  EXPECT_THAT(offered({"shoal", "bench", "--transports", ""}), AllOf(Contains("host"), Not(Contains("auto"))));
  EXPECT_THAT(offered({"shoal", "train", "--transport", ""}), Contains("auto"));
  EXPECT_THAT(offered({"shoal", "bench", "--buffers", "s"}), ElementsAre("shared", "staged"));
  for (const std::string command : {"train", "plan"})
    EXPECT_THAT(offered({"shoal", command, "--compress", ""}), ElementsAre("none", "fp16", "bf16", "int8"));
  EXPECT_THAT(offered({"shoal", "plan", "--dtype", ""}), AllOf(Contains("bf16_mixed"), Contains("mixed_fp32_grads")));
  EXPECT_THAT(offered({"shoal", "train", "--dtype", ""}), Not(Contains("mixed")));
  EXPECT_THAT(offered({"shoal", "completion", ""}), ElementsAre("bash", "zsh"));
}

TEST(Completion, json_has_whole_help_texts) {
  std::map<std::string, std::string> help;
  for (const auto& command : nlohmann::json::parse(shoal({"completion", "bash", "--json", "-"}).output)) {
    if (command["command"] != "train") continue;
    for (const auto& option : command["options"]) help[option["names"].back()] = option["help"];
  }
  EXPECT_THAT(help["--schedule"], testing::EndsWith("step, down by a factor"));
  EXPECT_THAT(help["--logging-data"], testing::HasSubstr("rank 0's wrapper"));
}

// An empty answer makes bash offer files.
TEST(Completion, bash_offers_files_where_anything_may_stand) {
  EXPECT_THAT(offered({"shoal", "train", "--save", "che"}), IsEmpty());
  EXPECT_THAT(offered({"shoal", "checkpoint", "verify", "tr"}), IsEmpty());
  EXPECT_THAT(offered({"shoal", "launch", "-n", "2", "--", "./program", "--he"}), IsEmpty());
}

// The scripts come from the commands as they are.
TEST(Completion, knows_every_option_of_every_command) {
  const auto commands = nlohmann::json::parse(shoal({"completion", "bash", "--json", "-"}).output);
  const auto bash = shoal({"completion", "bash"}).output;
  const auto zsh = shoal({"completion", "zsh"}).output;
  EXPECT_THAT(zsh, testing::StartsWith("#compdef shoal\n"));
  EXPECT_GE(commands.size(), 16U);
  for (const auto& command : commands) {
    auto line = std::vector<std::string>{};
    std::istringstream words(command["command"].get<std::string>());
    for (std::string word; words >> word;) line.push_back(word);
    line.emplace_back("--help");
    const auto help = shoal(line).output;
    for (const auto& option : command["options"]) {
      for (const auto& name : option["names"]) {
        EXPECT_THAT(help, testing::HasSubstr(name.get<std::string>()));
        EXPECT_THAT(bash, testing::HasSubstr(name.get<std::string>()));
        EXPECT_THAT(zsh, testing::HasSubstr("'" + name.get<std::string>() + ":"));
      }
    }
  }
}

TEST(Completion, other_shells_are_refused) {
  const auto ended = shoal({"completion", "fish"});
  EXPECT_EQ(ended.code, 2);
  EXPECT_THAT(ended.output, testing::HasSubstr("fish"));
}

}  // namespace
}  // namespace shoal::test::completion_test
