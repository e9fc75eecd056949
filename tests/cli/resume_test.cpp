// `shoal train --resume`: a stopped training continues as if it had not been stopped.

#include <gtest/gtest.h>
#include <zlib.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "tests/cli/shoal_program.h"
#include "tests/support/temp_folder.h"

namespace shoal::test::resume_test {
namespace {

struct Case {
  const char* strategy;
  const char* suffix = "";
  std::vector<std::string> options{};
};

void PrintTo(const Case& one, std::ostream* out) {
  *out << one.strategy << one.suffix;
}

class Resume : public testing::TestWithParam<Case> {};

std::vector<std::string> training(const std::string& strategy, const TempFolder& folder, int steps,
                                  std::vector<std::string> more) {
  std::vector<std::string> line{"train",
                                "--data",
                                "text:" + folder.file("text"),
                                "--model",
                                "gpt",
                                "--strategy",
                                strategy,
                                "--ranks",
                                strategy == "none" ? "1" : "2",
                                "--steps",
                                std::to_string(steps),
                                "--batch",
                                "2",
                                "--schedule",
                                "linear_warmup",
                                "--warmup-steps",
                                "6",
                                "--json",
                                folder.file("report.json")};
  line.insert(line.end(), more.begin(), more.end());
  return line;
}

// Bytes in a fixed pseudo-random order; 5 steps per epoch.
void write_text(const TempFolder& folder) {
  std::ofstream file(folder.file("text"), std::ios::binary);
  uint32_t state = 1;
  for (int i = 0; i < 2500; ++i) {
    state = state * 1664525 + 1013904223;
    file.put(static_cast<char>('a' + (state >> 24) % 26));
  }
}

TEST_P(Resume, BEY05_BEY06_ends_with_the_same_bits_as_a_run_that_was_not_stopped) {
  const TempFolder folder;
  write_text(folder);
  const auto run = folder.file("run");
  const auto go = [&](std::vector<std::string> more) {
    more.insert(more.end(), GetParam().options.begin(), GetParam().options.end());
    return shoal(training(GetParam().strategy, folder, 9, more));
  };
  auto ended = go({"--save", folder.file("whole"), "--save-every", "4"});
  ASSERT_EQ(ended.code, 0) << ended.output;
  const auto whole = read(folder.file("report.json"));
  // The state of a run that was stopped after step 4.
  std::filesystem::create_directory(run);
  std::filesystem::copy(folder.file("whole/step-4"), run + "/step-4", std::filesystem::copy_options::recursive);
  ended = go({"--save", run, "--keep-last", "1", "--resume", "latest"});
  ASSERT_EQ(ended.code, 0) << ended.output;
  EXPECT_NE(ended.output.find("going on after step 4"), std::string::npos) << ended.output;
  const auto resumed = read(folder.file("report.json"));
  EXPECT_EQ(resumed["params"], whole["params"]);
  EXPECT_EQ(resumed["buffers"], whole["buffers"]);
  ASSERT_EQ(resumed["loss"].size(), 5U);
  for (size_t i = 0; i < 5; ++i) {
    EXPECT_EQ(resumed["loss"][i], whole["loss"][i + 4]) << i;
    EXPECT_EQ(resumed["lr"][i], whole["lr"][i + 4]) << i;
  }
  EXPECT_FALSE(std::filesystem::exists(run + "/step-4")) << "one stays";
  EXPECT_TRUE(std::filesystem::exists(run + "/step-9/index.json"));
}

INSTANTIATE_TEST_SUITE_P(
    Strategies, Resume,
    testing::Values(Case{"none"}, Case{"ddp"}, Case{"zero1"}, Case{"zero2"}, Case{"megatron"}, Case{"fsdp"},
                    Case{"hybrid"}, Case{"decentralized"}, Case{"hybrid_gossip"},
                    Case{"local_sgd", "", {"--sync-every", "3"}}, Case{"slowmo", "", {"--sync-every", "3"}},
                    Case{"diloco", "", {"--sync-every", "3", "--fragments", "2", "--sync-delay", "1"}},
                    Case{"ddp", "_powersgd", {"--compress", "powersgd:2:1"}},
                    Case{"zero1", "_muon", {"--optimizer", "muon"}}),
    [](const auto& info) { return std::string(info.param.strategy) + info.param.suffix; });

TEST(Partial, BEY05_fine_tuning_takes_the_model_and_begins_at_step_zero) {
  const TempFolder folder;
  const auto first_loss = [&](const std::vector<std::string>& more) {
    std::vector<std::string> line{"train",
                                  "--data",
                                  "reference",
                                  "--model",
                                  "mlp",
                                  "--steps",
                                  "1",
                                  "--optimizer",
                                  "sgd",
                                  "--json",
                                  folder.file("report.json")};
    line.insert(line.end(), more.begin(), more.end());
    const auto ended = shoal(line);
    EXPECT_EQ(ended.code, 0) << ended.output;
    return read(folder.file("report.json"))["loss"][0].get<double>();
  };
  const auto run = folder.file("run");
  ASSERT_EQ(shoal({"train", "--data", "reference", "--model", "mlp", "--steps", "30", "--save", run}).code, 0);
  // Another optimizer, whose state the checkpoint does not have, and fewer steps.
  EXPECT_LT(first_loss({"--resume", run, "--partial"}), 0.9 * first_loss({}));
}

TEST(ResumeErrors, say_what_is_missing) {
  const TempFolder folder;
  const auto refused = [](std::vector<std::string> line, const std::string& text) {
    line.insert(line.begin(), {"train", "--data", "reference"});
    const auto ended = shoal(line);
    EXPECT_NE(ended.code, 0);
    EXPECT_NE(ended.output.find(text), std::string::npos) << ended.output;
  };
  refused({"--resume", "latest"}, "needs --save DIR");
  refused({"--keep-last", "2"}, "--keep-last needs --save DIR");
  refused({"--resume", folder.file("nothing")}, "no such file or folder");
  refused({"--strategy", "local", "--save", folder.file("run"), "--save-every", "1"}, "local has no checkpoints");
  refused({"--partial"}, "--partial needs --resume");
  ASSERT_EQ(shoal({"train", "--data", "reference", "--steps", "2", "--save", folder.file("run")}).code, 0);
  refused({"--resume", folder.file("run"), "--steps", "2"}, "give more steps");
  // A job that is started again until it ends well is done, also if the model is all that was not written.
  std::filesystem::remove(folder.file("run/model.safetensors"));
  const auto done =
      shoal({"train", "--data", "reference", "--steps", "2", "--save", folder.file("run"), "--resume", "latest"});
  EXPECT_EQ(done.code, 0);
  EXPECT_EQ(done.output,
            folder.file("run/step-2") + ": this training of 2 steps is done; for more, give more steps or epochs\n");
  EXPECT_TRUE(std::filesystem::exists(folder.file("run/model.safetensors")));
  refused({"--resume", folder.file("run"), "--steps", "4", "--model", "mlp"}, "missing: ");
  // Its AdamW reads the checkpoint's state, its Muon does not.
  refused({"--resume", folder.file("run"), "--steps", "4", "--optimizer", "muon"},
          "the state for shoal::Muon has no 'momentum_buffer'; take the optimizer that the checkpoint was saved with");
  const auto alone = folder.file("run/model.safetensors");
  refused({"--resume", alone, "--steps", "4"}, "--resume " + alone +
                                                   ": it holds a model without the state of a "
                                                   "training; give --partial");
  EXPECT_EQ(shoal({"train", "--data", "reference", "--steps", "1", "--resume", alone, "--partial"}).code, 0);
}

// Replaces text in the index of a checkpoint, which has its own checksum.
void change_index(const std::string& checkpoint, const std::string& from, const std::string& to) {
  std::ifstream file(checkpoint + "/index.json");
  std::string text{std::istreambuf_iterator<char>(file), {}};
  ASSERT_NE(text.find(from), std::string::npos) << from;
  for (size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size())
    text.replace(at, from.size(), to);
  text.erase(text.rfind(",\"crc32\""));
  std::array<char, 9> sum{};
  std::snprintf(sum.data(), sum.size(), "%08lx", crc32_z(0, reinterpret_cast<const Bytef*>(text.data()), text.size()));
  std::ofstream(checkpoint + "/index.json") << text << ",\"crc32\":\"" << sum.data() << "\"}\n";
}

// Decentralised ranks have a schedule for each bucket, which no schedule of the program's shows.
TEST(ResumeElsewhere, BEY05_schedules_and_positions_follow_the_new_number_of_steps_per_epoch) {
  const TempFolder folder;
  write_text(folder);
  const auto go = [&](const std::string& ranks, const std::string& steps, const std::vector<std::string>& more) {
    std::vector<std::string> line{"train",      "--data",        "text:" + folder.file("text"),
                                  "--model",    "gpt",           "--ranks",
                                  ranks,        "--batch",       "2",
                                  "--strategy", "decentralized", "--schedule",
                                  "cosine",     "--steps",       steps};
    line.insert(line.end(), more.begin(), more.end());
    return shoal(line);
  };
  auto ended = go("2", "4", {"--save", folder.file("before")});
  ASSERT_EQ(ended.code, 0) << ended.output;
  ended = go("1", "9", {"--resume", folder.file("before"), "--save", folder.file("after")});
  ASSERT_EQ(ended.code, 0) << ended.output;
  EXPECT_NE(ended.output.find("going on after step 7"), std::string::npos) << ended.output;
  const auto state = read(folder.file("after/step-9/index.json"))["state"];
  EXPECT_EQ(state["global"]["schedule"], 9);
  EXPECT_EQ(state["ranks"][0]["param_groups"][0]["options"]["lr"], 0) << "of the last step of all";
  // What another program, or a damaged file, may have there.
  const auto refused = [&](const std::string& from, const std::string& to, const std::string& text) {
    change_index(folder.file("before/step-4"), from, to);
    ended = go("1", "9", {"--resume", folder.file("before")});
    EXPECT_NE(ended.output.find(text), std::string::npos) << ended.output;
    EXPECT_EQ(ended.output.find('\x1b'), std::string::npos) << ended.output;
    return ended.code != 0;
  };
  EXPECT_FALSE(refused("torch::optim::AdamWOptions", "\\u001b[31mred", "in the checkpoint \\x1b[31mred"));
  const auto ranks = read(folder.file("before/step-4/index.json"))["state"]["ranks"];
  const auto position = nlohmann::json::parse(ranks[0]["position"].get<std::string>());
  const auto key = R"(steps_per_epoch\":)" + position["steps_per_epoch"].dump();
  EXPECT_TRUE(refused(key, R"(steps_per_epoch\":\"x\")", "step 4 of \"x\" steps per epoch"));
  EXPECT_TRUE(refused(R"(steps_per_epoch\":\"x\")", R"(steps_per_epoch\":-5)", "step 4 of -5 steps per epoch"));
}

TEST(SaveEvery, BEY06_a_save_in_the_background_that_failed_does_not_cost_the_next_one) {
  for (const std::vector<std::string>& more : {std::vector<std::string>{}, {"--elastic", "1"}}) {
    const TempFolder folder;
    std::filesystem::create_directories(folder.file("run/step-2"));
    std::ofstream(folder.file("run/step-2/mine")) << "no checkpoint, which is never replaced";
    std::vector<std::string> line{"train",   "--data", "reference", "--model",          "mlp",          "--ranks", "2",
                                  "--steps", "5",      "--save",    folder.file("run"), "--save-every", "2"};
    line.insert(line.end(), more.begin(), more.end());
    const auto ended = shoal(line);
    EXPECT_EQ(ended.code, 0) << ended.output;
    EXPECT_NE(ended.output.find("step-2 was not saved"), std::string::npos) << ended.output;
    EXPECT_TRUE(std::filesystem::exists(folder.file("run/step-4/index.json"))) << ended.output;
    EXPECT_EQ(ended.output.find("step-4"), std::string::npos) << ended.output;
  }
}

// Saves after every step, so that most signals arrive in the middle of a save. The shell signals the launcher alone,
// which asks the ranks to stop.
TEST(Resume, BEY06_an_interrupt_or_a_termination_in_the_middle_of_a_save_leaves_a_whole_checkpoint) {
  for (const std::string signal : {"INT", "TERM", "INT", "TERM"}) {
    SCOPED_TRACE(signal);
    const TempFolder folder;
    write_text(folder);
    const auto run_folder = folder.file("run");
    std::string line = SHOAL;
    for (const auto& word :
         training("fsdp", folder, 50000, {"--save", run_folder, "--save-every", "1", "--keep-last", "2"})) {
      line += " " + word;
    }
    auto ended = run({"sh", "-c",
                      line + " & pid=$!; until grep -Eqs 'step-([5-9]|[0-9]{2})' " + run_folder +
                          "/latest; do sleep 0.05; done; kill -" + signal + " $pid; wait $pid"},
                     60);
    EXPECT_EQ(ended.code, 130) << ended.output;
    EXPECT_NE(ended.output.find("interrupted"), std::string::npos) << ended.output;
    int steps = 0;
    for (const auto& entry : std::filesystem::directory_iterator(run_folder)) {
      const auto name = entry.path().filename().string();
      if (name.starts_with("step-")) ++steps;
      EXPECT_TRUE(name.starts_with("step-") || name == "latest" || name == ".lock" || name == "model.safetensors")
          << name << " is left over";
    }
    EXPECT_LE(steps, 2);
    ended = shoal({"checkpoint", "verify", run_folder});
    EXPECT_EQ(ended.code, 0) << ended.output;
    std::ifstream latest(run_folder + "/latest");
    std::string step;
    latest >> step;
    const int next = std::stoi(step.substr(5)) + 2;
    ended = shoal(training("fsdp", folder, next, {"--save", run_folder, "--resume", "latest", "--seed", "2"}));
    EXPECT_EQ(ended.code, 0) << ended.output;
    EXPECT_NE(ended.output.find("--seed is 2, in the checkpoint 1: samples come in another order"), std::string::npos)
        << ended.output;
    EXPECT_EQ(read(folder.file("report.json"))["loss"].size(), 2U) << ended.output;
  }
}

}  // namespace
}  // namespace shoal::test::resume_test
