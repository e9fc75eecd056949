// `shoal train` as a user runs it.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/processors.h"
#include "tests/cli/shoal_program.h"
#include "tests/support/temp_folder.h"

namespace shoal::test::train_test {
namespace {

using nlohmann::json;

TEST(Train, writes_a_report_of_the_reference_peers_shape) {
  const TempFolder folder;
  const auto ended = shoal({"train", "--data", "reference", "--model", "gpt", "--steps", "6", "--ranks", "2", "--json",
                            folder.file("report.json")});
  ASSERT_EQ(ended.code, 0) << ended.output;
  const auto report = read(folder.file("report.json"));
  EXPECT_EQ(report["config"]["world"], 2);
  EXPECT_EQ(report["loss"].size(), 6U);
  EXPECT_EQ(report["timing"]["step_ms"].size(), 6U);
  EXPECT_EQ(report["timing"]["warm_up"], 3);
  for (const auto* field : {"median_ms", "min_ms", "load_1min"}) EXPECT_TRUE(report["timing"].contains(field));
  for (const auto* field : {"rss_before_mib", "rss_peak_mib", "growth_mib", "pss_mib"}) {
    EXPECT_EQ(report["memory"][field].size(), 2U) << field;
  }
  for (const auto* field : {"page_faults", "user_ms", "system_ms", "sleeps", "preemptions"}) {
    EXPECT_EQ(report["counters_per_step"][field].size(), 2U) << field;
  }
  const auto processor_ms = [&](const char* field) { return report["counters_per_step"][field][0].get<double>(); };
  EXPECT_GT(processor_ms("user_ms") + processor_ms("system_ms"), 0);
  EXPECT_EQ(report["params"].begin()->size(), 5U);
  EXPECT_EQ(report["params"]["wte.weight"]["shape"], (std::vector<int>{256, 64}));
}

// torchrun sets it to 1 for every rank; otherwise one rank per host would use all cores.
TEST(Train, respects_the_threads_that_the_environment_asks_for) {
  const TempFolder folder;
  const auto cores = processors();
  const auto threads_of = [&](const std::string& ranks, const std::string& variables,
                              const std::vector<std::string>& more) {
    const auto path = folder.file("report.json");
    std::vector<std::string> line{SHOAL, "train",   "--data", "reference", "--steps",
                                  "1",   "--ranks", ranks,    "--json",    path};
    line.insert(line.end(), more.begin(), more.end());
    const auto ended = run_together({{line, variables_of(variables)}}, 100).front();
    EXPECT_EQ(ended.code, 0) << ended.output;
    const auto told = ended.output.find(" for each rank, which makes steps slow: give --threads ") != std::string::npos;
    const auto used = read(path)["config"]["threads"].get<int>();
    EXPECT_EQ(told, used > 1 && used * std::stoi(ranks) > cores) << ended.output;
    return read(path)["config"]["threads"].get<int>();
  };
  EXPECT_EQ(threads_of("1", "OMP_NUM_THREADS=1", {}), 1);
  EXPECT_EQ(threads_of("2", "OMP_NUM_THREADS=2", {}), 2);
  EXPECT_EQ(threads_of("2", "OMP_NUM_THREADS=2", {"--threads", "1"}), 1);
  EXPECT_EQ(threads_of("2", "OMP_NUM_THREADS=many", {}), std::max(1, cores / 2)) << "as if it was not set";
  EXPECT_EQ(threads_of("1", "", {"--threads", std::to_string(cores + 1)}), cores + 1);
}

// As those of mpirun and srun, which say nothing about threads.
TEST(Train, ranks_on_the_same_cores_divide_them) {
  const TempFolder folder;
  const auto path = folder.file("report.json");
  const auto ended = shoal({"launch", "-n", "2", "--", "env", "-u", "OMP_NUM_THREADS", SHOAL, "train", "--data",
                            "reference", "--model", "mlp", "--steps", "1", "--json", path});
  ASSERT_EQ(ended.code, 0) << ended.output;
  EXPECT_EQ(read(path)["config"]["threads"], std::max(1, processors() / 2));
  EXPECT_EQ(ended.output.find("which makes steps slow"), std::string::npos) << ended.output;
}

TEST(Train, ELA07_the_strategy_changes_between_two_steps) {
  const TempFolder folder;
  const std::vector<std::string> common{"--data",     "reference",   "--model",   "mlp",     "--ranks",
                                        "2",          "--optimizer", "adamw",     "--steps", "8",
                                        "--schedule", "cosine",      "--threads", "1"};
  auto line = common;
  line.insert(line.end(), {"--replan", "2:fsdp,4:megatron,6:zero1", "--unit-numel", "100", "--metrics",
                           folder.file("metrics.jsonl"), "--save", folder.file("run")});
  const auto changed = train(line);
  const auto straight = train(common);
  ASSERT_FALSE(changed.is_null() || straight.is_null());
  EXPECT_EQ(changed["params"], straight["params"]) << "to the bit";
  EXPECT_EQ(changed["lr"], straight["lr"]);
  ASSERT_EQ(changed["replans"].size(), 3U);
  EXPECT_EQ(changed["replans"][1]["replan"], "megatron");
  EXPECT_EQ(changed["replans"][1]["from"], "fsdp");
  EXPECT_GT(changed["replans"][1]["replan_bytes"], 0);
  std::ifstream metrics(folder.file("metrics.jsonl"));
  std::vector<int64_t> steps;
  for (std::string text; std::getline(metrics, text);) {
    const auto entry = json::parse(text);
    if (!entry.contains("replan")) continue;
    steps.push_back(entry["step"]);
    // `shoal top` and `shoal report` show it as an event, and not as a step.
    EXPECT_TRUE(entry["event"].get<std::string>().starts_with(entry["from"].get<std::string>() + " -> ")) << entry;
  }
  EXPECT_EQ(steps, (std::vector<int64_t>{2, 4, 6}));
  const auto report = shoal({"top", "--once", folder.file("metrics.jsonl")});
  EXPECT_EQ(report.code, 0) << report.output;
}

// Its parts are measured in the first ten steps of a strategy, and then in every hundredth.
TEST(Train, ELA07_the_parts_of_a_step_are_those_of_this_step_after_a_replan) {
  const TempFolder folder;
  const auto report = train({"--data", "reference", "--model", "mlp", "--ranks", "1", "--steps", "120", "--replan",
                             "12:fsdp", "--metrics", folder.file("metrics.jsonl")});
  ASSERT_FALSE(report.is_null());
  std::ifstream metrics(folder.file("metrics.jsonl"));
  std::vector<int64_t> steps;
  for (std::string text; std::getline(metrics, text);) {
    const auto line = json::parse(text);
    if (line.contains("backward_ms")) steps.push_back(line["step"]);
  }
  std::vector<int64_t> measured;
  for (int64_t step = 0; step < 10; ++step) measured.push_back(step);
  for (int64_t step = 12; step < 22; ++step) measured.push_back(step);
  measured.push_back(112);
  EXPECT_EQ(steps, measured);
  EXPECT_EQ(report["logging"]["sampled_steps"], 11) << "since the replan";
}

TEST(Train, ELA07_a_replan_that_cannot_be_is_refused) {
  const auto refusal = [](const std::string& plan, std::vector<std::string> more = {}) {
    std::vector<std::string> line{"train", "--data", "reference", "--ranks", "1", "--steps", "4", "--replan", plan};
    line.insert(line.end(), more.begin(), more.end());
    const auto ended = shoal(line);
    EXPECT_EQ(ended.code, 2);
    return ended.output;
  };
  const auto has = [](const std::string& text, const char* part) { return text.find(part) != std::string::npos; };
  EXPECT_TRUE(has(refusal("fsdp"), "--replan fsdp: give STEP:STRATEGY"));
  EXPECT_TRUE(has(refusal("2:ddp,2:fsdp"), "ascending steps"));
  EXPECT_TRUE(has(refusal("2:zero9"), "--replan zero9: not in this version"));
  EXPECT_TRUE(has(refusal("4:fsdp"), "training ends after step 4"));
  EXPECT_TRUE(has(refusal("2:decentralized"), "ranks of decentralized do not make every step together"));
  EXPECT_TRUE(has(refusal("2:zero1", {"--unit-numel", "5"}), "--unit-numel: ddp does not have it"));
}

TEST(Train, saves_a_file_that_python_reads) {
  const TempFolder folder;
  const auto ended = shoal({"train", "--data", "reference", "--model", "cnn", "--steps", "2", "--ranks", "2", "--save",
                            folder.file("checkpoint"), "--json", folder.file("report.json")});
  ASSERT_EQ(ended.code, 0) << ended.output;
  const auto path = folder.file("checkpoint/model.safetensors");
  EXPECT_NE(ended.output.find(path), std::string::npos) << "says where it lies";
  ASSERT_TRUE(std::filesystem::exists(path));
  if (run({PYTHON, "-c", "import safetensors.numpy"}, 60).code != 0) GTEST_SKIP() << "no safetensors in .venv";
  const auto python = run({PYTHON, "-c",
                           "import sys, json, safetensors.numpy as s\n"
                           "t = s.load_file(sys.argv[1])\n"
                           "print(json.dumps({n: [list(v.shape), float(v.astype('float64').sum())] for n, v in "
                           "t.items()}))",
                           path},
                          60);
  ASSERT_EQ(python.code, 0) << python.output;
  const auto seen = json::parse(python.output);
  const auto report = read(folder.file("report.json"));
  for (const auto* kind : {"params", "buffers"}) {
    for (const auto& [name, digest] : report[kind].items()) {
      ASSERT_TRUE(seen.contains(name)) << name;
      EXPECT_EQ(seen[name][0], digest["shape"]) << name;
      const double sum = digest["sum"];
      EXPECT_NEAR(seen[name][1].get<double>(), sum, 1e-9 * (1 + std::abs(sum))) << name;
    }
  }
}

TEST(Train, learns_fashion_mnist_and_evaluates_on_all_test_images) {
  if (!std::filesystem::exists("/usr/share/datasets/fashion-mnist")) GTEST_SKIP() << "dataset-fashion-mnist is missing";
  const TempFolder folder;
  const auto ended = shoal(
      {"train", "--model", "mlp", "--ranks", "3", "--epochs", "1", "--eval", "--json", folder.file("report.json")});
  ASSERT_EQ(ended.code, 0) << ended.output;
  const auto report = read(folder.file("report.json"));
  EXPECT_EQ(report["eval"][0]["count"], 10000);
  EXPECT_GT(report["eval"][0]["accuracy"], 0.78);
  EXPECT_EQ(report["loss"].size(), static_cast<size_t>(std::ceil(20000 / 64.0)));
}

TEST(Train, reads_any_text_file_for_gpt) {
  const TempFolder folder;
  std::ofstream(folder.file("text")) << std::string(40000, 'a') + std::string(40000, 'b');
  const auto ended = shoal({"train", "--model", "gpt", "--data", "text:" + folder.file("text"), "--steps", "8",
                            "--eval", "--ranks", "2", "--json", folder.file("report.json")});
  ASSERT_EQ(ended.code, 0) << ended.output;
  EXPECT_GT(read(folder.file("report.json"))["eval"][0]["perplexity"], 1);
}

TEST(Train, strategies_none_and_local_run) {
  EXPECT_EQ(shoal({"train", "--data", "reference", "--strategy", "none", "--steps", "2"}).code, 0);
  EXPECT_EQ(shoal({"train", "--data", "reference", "--strategy", "local", "--ranks", "2", "--steps", "2"}).code, 0);
}

// What a former run has left at a later step stays what `--resume latest` finds.
void expect_saved_when_interrupted(const std::string& options, bool former) {
  SCOPED_TRACE(options);
  const TempFolder folder;
  const auto checkpoint = folder.file("checkpoint");
  if (former) {
    std::filesystem::create_directories(checkpoint + "/step-900000");
    std::ofstream(checkpoint + "/latest") << "step-900000\n";
  }
  std::ofstream(folder.file("report.json")) << "of a former run";
  // The shell signals the launcher alone, which forwards the signal.
  const auto ended =
      run({"sh", "-c",
           std::string(SHOAL) + " train --data reference --model cnn --steps 50000 --batch 1 --ranks 2 " + options +
               " --save " + checkpoint + " --trace " + folder.file("trace") + " --json " + folder.file("report.json") +
               " & pid=$!; sleep 4; kill -INT $pid; wait $pid"},
          60);
  EXPECT_EQ(ended.code, 130) << ended.output;
  EXPECT_EQ(std::filesystem::exists(checkpoint + "/model.safetensors"), !former) << ended.output;
  EXPECT_NE(ended.output.find("interrupted; checkpoint in "), std::string::npos) << ended.output;
  EXPECT_LT(ended.seconds, 14);
  std::ifstream latest(checkpoint + "/latest");
  std::string name;
  latest >> name;
  EXPECT_EQ(name == "step-900000", former) << name;
  EXPECT_EQ(ended.output.find("still those of the earlier run (step-900000)") != std::string::npos, former);
  EXPECT_FALSE(std::filesystem::exists(folder.file("report.json"))) << "no report of this run";
  for (const auto* rank : {"trace/rank-0.json", "trace/rank-1.json"}) {
    ASSERT_TRUE(std::filesystem::exists(folder.file(rank))) << rank;
    EXPECT_GT(read(folder.file(rank))["traceEvents"].size(), 100U) << rank;
  }
}

TEST(Train, an_interrupt_saves_and_ends_with130) {
  expect_saved_when_interrupted("", /*former=*/false);
  expect_saved_when_interrupted("--strategy fsdp --transport gloo", /*former=*/true);
}

}  // namespace
}  // namespace shoal::test::train_test
