// Interrupts, killed ranks and evaluations under every strategy of `shoal train`, as a user sees them.

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <sstream>

#include "checkpoint/loading/reader.h"
#include "data/fashion_mnist.h"
#include "models/loss.h"
#include "models/registry.h"
#include "tests/cli/shoal_program.h"

namespace shoal::test::going_on_test {
namespace {

using Line = std::vector<std::string>;

// Strategies, as the program lists them.
std::vector<std::string> strategies() {
  const auto text = shoal({"train", "--strategy", "?"}).output;
  const std::string mark = "available: ";
  std::istringstream list(text.substr(std::min(text.find(mark), text.size() - mark.size()) + mark.size()));
  std::vector<std::string> names;
  for (std::string name; list >> name;) {
    if (name.ends_with(',')) name.pop_back();
    names.push_back(name);
  }
  return names;
}

// Command line for as many ranks as the strategy needs: two, or two hosts of two.
Line of_strategy(const std::string& strategy) {
  if (strategy == "none") return {"--strategy", strategy, "--ranks", "1"};
  if (strategy != "hybrid_gossip") return {"--strategy", strategy, "--ranks", "2"};
  return {"--strategy", strategy, "--ranks", "4", "--topology-local-size", "2"};
}

// Whether the other ranks continue after one has ended.
bool goes_on(const std::string& strategy) {
  return strategy == "decentralized" || strategy == "hybrid_gossip";
}

class GoingOn : public testing::TestWithParam<std::string> {
 protected:
  // Bytes in a fixed pseudo-random order; a few steps per epoch.
  GoingOn() {
    std::ofstream file(folder_.file("text"), std::ios::binary);
    uint32_t state = 1;
    for (int i = 0; i < 3000; ++i) {
      state = state * 1664525 + 1013904223;
      file.put(static_cast<char>('a' + (state >> 24) % 26));
    }
  }

  Line reference(const Line& more) const { return with({"train", "--data", "reference", "--model", "mlp"}, more); }
  Line text_data() const { return {"--data", "text:" + folder_.file("text"), "--model", "gpt", "--batch", "2"}; }
  // Data for a model with batch norm.
  Line image_data() const {
    const auto write = [this](const std::string& name, const std::vector<uint8_t>& sizes) {
      std::ofstream file(folder_.file(name), std::ios::binary);
      file << '\0' << '\0' << '\x08' << static_cast<char>(sizes.size());
      int64_t count = 1;
      for (const auto size : sizes) {
        file << '\0' << '\0' << '\0' << static_cast<char>(size);
        count *= size;
      }
      const int64_t values = sizes.size() == 1 ? 10 : 256;  // classes, or grey
      for (int64_t i = 0; i < count; ++i) file << static_cast<char>(i * i / 7 % values);
    };
    for (const std::string part : {"train", "t10k"}) {
      write(part + "-images-idx3-ubyte", {96, 28, 28});
      write(part + "-labels-idx1-ubyte", {96});
    }
    return {"--data", "fashion-mnist:" + folder_.file(""), "--model", "cnn", "--batch", "4"};
  }
  Line text(const Line& more) const {
    Line line{"train"};
    const auto data = text_data();
    line.insert(line.end(), data.begin(), data.end());
    return with(line, more);
  }
  Line with(Line line, const Line& more) const {
    const auto strategy = of_strategy(GetParam());
    line.insert(line.end(), {"--threads", "1", "--json", folder_.file("report.json"), "--metrics", metrics()});
    line.insert(line.end(), strategy.begin(), strategy.end());
    line.insert(line.end(), more.begin(), more.end());
    return line;
  }
  std::string metrics() const { return folder_.file("metrics.jsonl"); }
  std::string saved() const { return folder_.file("run"); }
  nlohmann::json report() const { return read(folder_.file("report.json")); }

  // Trains with and without evaluation; returns the last evaluated loss.
  double loss_evaluated(const Line& data) const {
    const auto train = [&](const Line& more) {
      auto line = with({"train", "--steps", "9", "--optimizer", "sgd"}, data);
      line.insert(line.end(), more.begin(), more.end());
      const auto ended = shoal(line);
      EXPECT_EQ(ended.code, 0) << ended.output;
      return ended.code == 0 ? report() : nlohmann::json();
    };
    const auto plain = train({});
    const auto evaluated = train({"--eval", "--save", saved()});
    if (plain.is_null() || !evaluated.contains("eval")) {
      ADD_FAILURE() << "there is no evaluation";
      return 0;
    }
    EXPECT_EQ(evaluated["loss"], plain["loss"]);
    EXPECT_EQ(evaluated["params"], plain["params"]);
    EXPECT_EQ(evaluated["buffers"], plain["buffers"]);
    return evaluated["eval"].back()["loss"];
  }

  // Loss of the saved model on all test images at once.
  double loss_of_saved_cnn() const {
    const torch::NoGradGuard no_grad;
    const auto model = models::make_model("cnn", "tiny", models::Init::torch, /*seed=*/0);
    const CheckpointReader reader(saved() + "/model.safetensors", /*verify=*/false);
    for (const auto& parameter : model->named_parameters()) parameter.value().copy_(reader.read(parameter.key()));
    for (const auto& buffer : model->named_buffers()) buffer.value().copy_(reader.read(buffer.key()));
    model->eval();
    const auto images = data::fashion_mnist(data::Split::test, folder_.path());
    std::vector<size_t> all(*images->size());
    std::iota(all.begin(), all.end(), 0);
    const auto batch = images->get_batch(all);
    return models::loss_of(model->forward(batch.data), batch.target).item<double>();
  }

  // Runs the program. Once its metrics have `lines` lines, the shell runs `then`, with the program's process in $pid.
  Ended disturbed(const Line& line, int lines, const std::string& then) const {
    std::string words = SHOAL;
    for (const auto& word : line) words += " " + word;
    return run({"sh", "-c",
                words + " & pid=$!; until [ $(cat " + metrics() + " 2>/dev/null | wc -l) -ge " + std::to_string(lines) +
                    " ] || ! kill -0 $pid 2>/dev/null; do sleep 0.02; done; " + then + "; wait $pid"},
               120);
  }
  static std::string kill_rank(int rank) {
    return "for child in $(cat /proc/$pid/task/*/children); do grep -qx shoal-rank-" + std::to_string(rank) +
           " /proc/$child/comm && kill -9 $child; done";
  }

  std::vector<nlohmann::json> lines_of_metrics() const {
    std::ifstream file(metrics());
    std::vector<nlohmann::json> list;
    for (std::string line; std::getline(file, line);) list.push_back(nlohmann::json::parse(line));
    return list;
  }

  TempFolder folder_;
};

TEST_P(GoingOn, an_interrupt_leaves_what_resumes_and_says_where) {
  const auto strategy = GetParam();
  auto ended = disturbed(reference({"--steps", "1000000", "--save", saved()}), 20, "kill -INT $pid");
  EXPECT_EQ(ended.code, 130) << ended.output;
  EXPECT_TRUE(std::filesystem::exists(saved() + "/model.safetensors")) << ended.output;
  if (strategy == "local") {
    EXPECT_NE(ended.output.find("interrupted; model in " + saved() + "/model.safetensors\n"), std::string::npos)
        << ended.output;
    return;
  }
  const std::string says = "interrupted; checkpoint in " + saved() + "/step-";
  const auto place = ended.output.find(says);
  ASSERT_NE(place, std::string::npos) << ended.output;
  EXPECT_EQ(ended.output.find("interrupted", place + 1), std::string::npos) << "once: " << ended.output;
  const int step = std::stoi(ended.output.substr(place + says.size()));
  EXPECT_GE(step, 20);
  ended = shoal({"checkpoint", "verify", saved()});
  EXPECT_EQ(ended.code, 0) << ended.output;
  ended = shoal(reference({"--steps", std::to_string(step + 2), "--save", saved(), "--resume", "latest"}));
  EXPECT_EQ(ended.code, 0) << ended.output;
  EXPECT_NE(ended.output.find("going on after step " + std::to_string(step) + " "), std::string::npos) << ended.output;
  EXPECT_EQ(ended.output.find(" ranks)"), std::string::npos) << "exactly: " << ended.output;
  EXPECT_EQ(report()["loss"].size(), 2U);
}

// One strategy of each kind; batch norm below is for all. Under `local`, each rank evaluates its own model on a share
// of the data, and rank 0's model is saved.
class TextEvaluation : public GoingOn {};
INSTANTIATE_TEST_SUITE_P(Strategies, TextEvaluation,
                         testing::Values("ddp", "zero2", "megatron", "fsdp", "local", "local_sgd", "decentralized",
                                         "hybrid_gossip"),
                         [](const auto& info) { return info.param; });

TEST_P(TextEvaluation, evaluation_changes_nothing_and_what_is_saved_is_what_was_evaluated) {
  const double evaluated = loss_evaluated(text_data());
  if (goes_on(GetParam())) {
    for (const double distance : report()["strategy"]["consensus_distance"]) EXPECT_GT(distance, 0);
    for (const auto& line : lines_of_metrics()) {
      if (!line.contains("eval_loss")) continue;
      EXPECT_GT(line["consensus_distance"], 0) << line;
    }
  }
  if (GetParam() == "local") return;
  // One process whose learning rate is negligible.
  Line again{"train", "--strategy", "none", "--optimizer", "sgd", "--lr", "1e-30", "--steps", "1"};
  const auto data = text_data();
  again.insert(again.end(), data.begin(), data.end());
  again.insert(again.end(), {"--eval", "--resume", saved() + "/model.safetensors", "--partial"});
  again.insert(again.end(), {"--json", folder_.file("again.json")});
  const auto ended = shoal(again);
  ASSERT_EQ(ended.code, 0) << ended.output;
  EXPECT_NEAR(read(folder_.file("again.json"))["eval"][0]["loss"].get<double>(), evaluated, 1e-5);
}

// Buffers of rank 0, or their mean over ranks that have models of their own.
TEST_P(GoingOn, evaluation_of_batch_norm_changes_nothing_and_what_is_saved_is_what_was_evaluated) {
  const double evaluated = loss_evaluated(image_data());
  if (GetParam() == "local") return;
  EXPECT_NEAR(loss_of_saved_cnn(), evaluated, 1e-5);
}

// Evaluates every few steps, so that the rank often ends near an evaluation.
TEST_P(GoingOn, when_rank_zero_is_killed_the_others_end_or_go_on_and_say_what_it_would_have) {
  const auto ended = disturbed(text({"--steps", "120", "--eval", "--save", saved()}), 23,
                               GetParam() == "none" ? "kill -9 $pid" : kill_rank(0));
  EXPECT_FALSE(ended.overdue) << ended.output;
  if (!goes_on(GetParam())) {
    EXPECT_EQ(ended.code, 137) << ended.output;
    if (GetParam() != "none") {
      EXPECT_NE(ended.output.find("rank 0 was killed by signal 9"), std::string::npos) << ended.output;
    }
    EXPECT_LT(ended.seconds, 40);
    return;
  }
  EXPECT_EQ(ended.code, 0) << ended.output;
  EXPECT_TRUE(std::filesystem::exists(saved() + "/model.safetensors")) << ended.output;
  EXPECT_EQ(report()["loss"].size(), 120U) << "of the rank that took over";
  const auto lines = lines_of_metrics();
  int64_t last_step = 0;
  int64_t last_evaluation = 0;
  for (const auto& line : lines) {
    (line.contains("eval_loss") ? last_evaluation : last_step) = line["step"];
  }
  EXPECT_EQ(last_step, 119);
  EXPECT_EQ(last_evaluation, 119);
  EXPECT_NE(ended.output.find("test perplexity"), std::string::npos) << ended.output;
  EXPECT_NE(ended.output.find("  model  "), std::string::npos) << ended.output;
  // The remaining ranks have saved, and as many ranks resume exactly, at the same point of an epoch.
  auto left = text({"--steps", "300", "--save", saved(), "--resume", "latest"});
  *(std::find(left.begin(), left.end(), "--ranks") + 1) = GetParam() == "hybrid_gossip" ? "2" : "1";
  const auto again = shoal(left);
  EXPECT_EQ(again.code, 0) << again.output;
  EXPECT_NE(again.output.find("/run/step-120\n"), std::string::npos) << again.output;
}

INSTANTIATE_TEST_SUITE_P(Strategies, GoingOn, testing::ValuesIn(strategies()),
                         [](const auto& info) { return info.param; });

// For a custom graph, in which the ending rank connects the others.
class FileTopology : public GoingOn {};

TEST_P(FileTopology, DEC17_others_go_on_without_a_rank_that_connected_them) {
  std::ofstream(folder_.file("line.json")) << R"({"ranks": 3, "rounds": [{"links": [[0, 1]], "idle": [2]},)"
                                           << R"( {"links": [[1, 2]], "idle": [0]}]})";
  auto line = text({"--steps", "120", "--eval", "--topology-file", folder_.file("line.json")});
  *(std::find(line.begin(), line.end(), "--ranks") + 1) = "3";
  const auto ended = disturbed(line, 23, kill_rank(1));
  EXPECT_EQ(ended.code, 0) << ended.output;
  EXPECT_EQ(report()["loss"].size(), 120U);
  EXPECT_EQ(report()["strategy"]["removed"], (std::vector<double>{1, 1}));
}

INSTANTIATE_TEST_SUITE_P(Gossip, FileTopology, testing::Values("decentralized"));

// What mpirun allows: ranks go on without a dead one, and mpirun ends well; without the option it ends them.
TEST(GoingOn, ELA06_under_mpirun_an_elastic_job_goes_on_with_enable_recovery) {
  if (std::string(MPIRUN).empty()) GTEST_SKIP() << "this build has no MPI";
  for (const bool recovers : {true, false}) {
    const TempFolder folder;
    const auto metrics = folder.file("metrics.jsonl");
    const auto steps = std::to_string(recovers ? 600 : 1'000'000);
    const auto script = fmt::format(
        "{0} {1} -n 3 {2} train --data reference --model mlp --threads 1 --steps {3} --elastic 1 --metrics {4} & "
        "pid=$!; "
        "for i in $(seq 600); do [ -f {4} ] && [ $(wc -l < {4}) -gt 20 ] && break; sleep 0.05; done; "
        "for rank in $(pgrep -f 'train .* --metrics {4}'); do "
        "tr '\\0' '\\n' < /proc/$rank/environ | grep -q '^OMPI_COMM_WORLD_RANK=1$' && kill -9 $rank; done; "
        "wait $pid; echo code $?; grep -c generation {4}; grep loss {4} | tail -1",
        MPIRUN, recovers ? "--enable-recovery" : "", SHOAL, steps, metrics);
    const auto ended = run_together({{{"bash", "-c", script}, variables_of(MPIRUN_ENVIRONMENT)}}, 60).front();
    EXPECT_FALSE(ended.overdue) << ended.output;
    EXPECT_EQ(ended.output.find("code 0") != std::string::npos, recovers) << ended.output;
    if (!recovers) continue;
    EXPECT_NE(ended.output.find("2 ranks go on"), std::string::npos) << ended.output;
    EXPECT_NE(ended.output.find("\"step\":599"), std::string::npos) << ended.output;
  }
}

}  // namespace
}  // namespace shoal::test::going_on_test
