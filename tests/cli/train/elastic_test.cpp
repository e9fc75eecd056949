// `shoal train --elastic`: ranks are killed, and the others go on.

#include <filesystem>
#include <fstream>

#include "tests/cli/shoal_program.h"

namespace shoal::test::elastic_test {
namespace {

using Line = std::vector<std::string>;

Line operator+(Line line, const Line& more) {
  line.insert(line.end(), more.begin(), more.end());
  return line;
}

class ElasticTrain : public testing::Test {
 protected:
  Line elastic(int ranks, const std::string& range) const {
    return {"train",   "--elastic", range,   "--ranks", std::to_string(ranks), "--threads", "1", "--metrics",
            metrics(), "--save",    saved(), "--json",  file("report.json")};
  }
  Line elastic(int ranks, int least) const { return elastic(ranks, std::to_string(least)); }
  static Line reference() { return {"--data", "reference", "--model", "mlp"}; }
  Line text(int batch = 2) const {
    std::ofstream out(file("text"), std::ios::binary);
    uint32_t state = 1;
    for (int i = 0; i < 6000; ++i) {
      state = state * 1664525 + 1013904223;
      out.put(static_cast<char>('a' + (state >> 24) % 26));
    }
    return {"--data", "text:" + file("text"), "--model", "gpt", "--batch", std::to_string(batch)};
  }
  std::string file(const std::string& name) const { return folder_.file(name); }
  std::string metrics() const { return file("metrics.jsonl"); }
  std::string saved() const { return file("run"); }

  // Runs the program. Once its metrics have `lines` lines, the shell runs `then`, with the program's process in $pid.
  Ended disturbed(const Line& line, int lines, const std::string& then) const {
    std::string words = SHOAL;
    for (const auto& word : line) words += " " + word;
    return run({"sh", "-c",
                words + " & pid=$!; until [ $(cat " + metrics() + " 2>/dev/null | wc -l) -ge " + std::to_string(lines) +
                    " ] || ! kill -0 $pid 2>/dev/null; do sleep 0.01; done; " + then + "; wait $pid"},
               100);
  }
  static std::string kill_rank(int rank) {
    return "for child in $(cat /proc/$pid/task/*/children); do grep -qx shoal-rank-" + std::to_string(rank) +
           " /proc/$child/comm && kill -9 $child; done";
  }
  // Of a job that may grow, whose ranks are not forks: one of those that run, and a line of the metrics.
  static std::string ranks() {
    return "for child in $(cat /proc/$pid/task/*/children); do grep -qx shoal /proc/$child/comm && echo $child; done";
  }
  // A rank stands still while another one starts, which so comes before the job is done.
  static std::string while_one_stands_still(const std::string& then) {
    return then + "; first=$(" + ranks() + " | head -n 1); kill -STOP $first; sleep 4; kill -CONT $first";
  }
  std::vector<nlohmann::json> lines_of_metrics() const {
    std::ifstream in(metrics());
    std::vector<nlohmann::json> list;
    for (std::string line; std::getline(in, line);) list.push_back(nlohmann::json::parse(line));
    return list;
  }
  // The end of a rank in the metrics; null, and a test failure, if there is not exactly one.
  nlohmann::json event() const {
    nlohmann::json found;
    for (const auto& line : lines_of_metrics()) {
      if (!line.contains("event")) continue;
      EXPECT_TRUE(found.is_null()) << line;
      found = line;
    }
    EXPECT_FALSE(found.is_null());
    return found;
  }

  TempFolder folder_;
};

class ElasticStrategies : public ElasticTrain, public testing::WithParamInterface<const char*> {};
INSTANTIATE_TEST_SUITE_P(All, ElasticStrategies,
                         testing::Values("ddp", "zero1", "zero2", "megatron", "fsdp", "fsdp_grad_op"),
                         [](const auto& info) { return info.param; });

// And one that ranks cannot join.
class ElasticEnds : public ElasticTrain, public testing::WithParamInterface<const char*> {};
INSTANTIATE_TEST_SUITE_P(All, ElasticEnds,
                         testing::Values("ddp", "zero1", "zero2", "megatron", "fsdp", "fsdp_grad_op", "hybrid_gossip"),
                         [](const auto& info) { return info.param; });
class ElasticEpochEnds : public ElasticTrain, public testing::WithParamInterface<const char*> {};
INSTANTIATE_TEST_SUITE_P(All, ElasticEpochEnds,
                         testing::Values("ddp", "zero1", "zero2", "megatron", "fsdp", "fsdp_grad_op", "diloco",
                                         "hybrid_gossip"),
                         [](const auto& info) { return info.param; });

// And a strategy whose ranks differ, so that fewer ranks cannot have the bits of more.
class ElasticEpochs : public ElasticTrain, public testing::WithParamInterface<const char*> {};
INSTANTIATE_TEST_SUITE_P(All, ElasticEpochs,
                         testing::Values("ddp", "zero1", "zero2", "megatron", "fsdp", "fsdp_grad_op", "diloco"),
                         [](const auto& info) { return info.param; });

// The batches of reference data depend on step and rank alone, so a job that is stopped there and resumes with two
// ranks does the same.
TEST_P(ElasticEnds, ELA01_ELA02_ELA11_goes_on_with_the_bits_of_a_job_that_resumes_with_fewer_ranks) {
  const std::string strategy = GetParam();
  const bool first = strategy == "ddp" || strategy == "zero2" || strategy == "fsdp";  // rank 0 is killed
  const Line how = reference() + Line{"--strategy", strategy, "--clip", "0.5", "--accumulate", "2"};
  const auto ended = disturbed(elastic(3, 2) + how + Line{"--steps", "400"}, 20, kill_rank(first ? 0 : 1));
  ASSERT_EQ(ended.code, 0) << ended.output;
  const auto told = event();
  ASSERT_FALSE(told.is_null()) << ended.output;
  const int step = told["step"];
  EXPECT_GE(step, 20);
  EXPECT_EQ(told["lost"], nlohmann::json::array({first ? 0 : 1}));
  EXPECT_NE(ended.output.find("2 ranks go on after step " + std::to_string(step)), std::string::npos) << ended.output;
  const auto report = read(file("report.json"));
  EXPECT_EQ(report["loss"].size(), 400U);
  EXPECT_EQ(report["elastic"]["changes"].size(), 1U);
  EXPECT_EQ(report["elastic"]["ranks"], 2);
  int64_t steps = 0;
  for (const auto& line : lines_of_metrics()) {
    if (!line.contains("loss")) continue;
    EXPECT_EQ(line["step"], steps++);
  }
  EXPECT_EQ(steps, 400);

  const Line fixed{"train", "--threads", "1", "--save", file("again"), "--json", file("again.json")};
  auto again = shoal(fixed + how + Line{"--ranks", "3", "--steps", std::to_string(step)});
  ASSERT_EQ(again.code, 0) << again.output;
  again = shoal(fixed + how + Line{"--ranks", "2", "--steps", "400", "--resume", "latest"});
  ASSERT_EQ(again.code, 0) << again.output;
  EXPECT_EQ(report["params"], read(file("again.json"))["params"]) << "after step " << step;
}

TEST_P(ElasticEpochEnds, ELA01_an_epoch_goes_on_with_checkpoints_evaluation_and_schedule) {
  const std::string strategy = GetParam();
  const Line how = text() + Line{"--strategy", strategy, "--eval", "--schedule", "cosine"} +
                   (strategy == "diloco" ? Line{"--transport", "tcp"} : Line{});  // ElasticEpochs: in shared memory
  const auto ended = disturbed(elastic(3, 1) + how + Line{"--epochs", "3", "--save-every", "4"}, 20,
                               kill_rank(strategy == "ddp" || strategy == "fsdp" ? 0 : 2));
  ASSERT_EQ(ended.code, 0) << ended.output;
  ASSERT_FALSE(event().is_null());
  const auto report = read(file("report.json"));
  EXPECT_EQ(report["eval"].size(), 3U) << ended.output;
  EXPECT_LT(report["lr"].back(), 1e-5) << "cosine comes down to 0 at the end";
  int64_t last = -1;
  for (const auto& line : lines_of_metrics()) {
    if (!line.contains("loss")) continue;
    EXPECT_GT(line["step"], last) << "steps are counted as by the ranks that are left";
    last = line["step"];
  }
  EXPECT_TRUE(std::filesystem::exists(saved() + "/step-" + std::to_string(last + 1))) << last;
  EXPECT_EQ(shoal({"checkpoint", "verify", saved()}).code, 0);
  // The checkpoint is at the end of the third epoch of two ranks.
  const auto more =
      shoal(Line{"train", "--ranks", "2", "--save", saved(), "--resume", "latest", "--json", file("more.json")} + how +
            Line{"--epochs", "4"});
  EXPECT_EQ(more.code, 0) << more.output;
  EXPECT_NE(more.output.find("going on after step " + std::to_string(last + 1) + " "), std::string::npos)
      << more.output;
  EXPECT_EQ(read(file("more.json"))["loss"].size(), static_cast<size_t>(last + 1) / 3);
}

TEST_P(ElasticStrategies, ELA06_a_rank_joins_and_the_bits_are_those_of_a_job_that_resumes_with_more_ranks) {
  const std::string strategy = GetParam();
  const Line how = reference() + Line{"--strategy", strategy, "--clip", "0.5"};
  const auto ended =
      disturbed(elastic(2, "2:3") + how + Line{"--steps", "500"}, 1, while_one_stands_still("kill -USR2 $pid"));
  ASSERT_EQ(ended.code, 0) << ended.output;
  const auto told = event();
  ASSERT_FALSE(told.is_null()) << ended.output;
  EXPECT_EQ(told["joined"], nlohmann::json::array({2}));
  EXPECT_EQ(told["ranks"], 3);
  const int step = told["step"];
  const auto report = read(file("report.json"));
  EXPECT_EQ(report["loss"].size(), 500U);
  EXPECT_EQ(report["elastic"]["ranks"], 3);
  EXPECT_EQ(report["elastic"]["steps_before"], 0);
  EXPECT_EQ(report["config"]["world"], 2);

  const Line fixed{"train", "--threads", "1", "--save", file("again"), "--json", file("again.json")};
  auto again = shoal(fixed + how + Line{"--ranks", "2", "--steps", std::to_string(step)});
  ASSERT_EQ(again.code, 0) << again.output;
  again = shoal(fixed + how + Line{"--ranks", "3", "--steps", "500", "--resume", "latest"});
  ASSERT_EQ(again.code, 0) << again.output;
  EXPECT_EQ(report["params"], read(file("again.json"))["params"]) << "after step " << step;
}

TEST_P(ElasticEpochs, ELA06_a_rank_is_replaced_in_an_epoch_with_checkpoints_evaluation_and_schedule) {
  const std::string strategy = GetParam();
  const Line how = text() + Line{"--strategy", strategy, "--eval", "--schedule", "cosine", "--epochs", "4"};
  const std::string place = strategy == "ddp" || strategy == "fsdp" ? "1" : "2";
  const auto ended = disturbed(elastic(2, "1:2") + how + Line{"--save-every", "20", "--max-restarts", "1"}, 10,
                               while_one_stands_still("kill -9 $(" + ranks() + " | sed -n " + place + "p)"));
  ASSERT_EQ(ended.code, 0) << ended.output;
  const auto report = read(file("report.json"));
  ASSERT_EQ(report["elastic"]["changes"].size(), 2U) << ended.output;
  EXPECT_EQ(report["elastic"]["changes"][1]["joined"], nlohmann::json::array({2}));
  EXPECT_EQ(report["elastic"]["ranks"], 2);
  EXPECT_EQ(report["eval"].size(), 4U) << ended.output;
  EXPECT_LT(report["lr"].back(), 1e-5) << "cosine comes down to 0 at the end";
  EXPECT_EQ(shoal({"checkpoint", "verify", saved()}).code, 0);
}

// 168 samples, of which 8 steps take 160: the micro-batch behind them fills no step, as without --keep-global-batch.
TEST_F(ElasticTrain, ELA05_a_global_batch_that_is_kept_makes_as_many_steps_as_epochs_have) {
  const Line how = text(/*batch=*/5) + Line{"--accumulate", "2", "--epochs", "3", "--eval"};
  const auto kept = shoal(elastic(2, 1) + how + Line{"--keep-global-batch"});
  ASSERT_EQ(kept.code, 0) << kept.output;
  const auto report = read(file("report.json"));
  ASSERT_EQ(report["eval"].size(), 3U) << kept.output;
  EXPECT_EQ(report["loss"].size(), 3 * 8U);
  const auto per_epoch = report["loss"].size() / 3;
  std::vector<int64_t> evaluated;
  for (const auto& line : lines_of_metrics()) {
    if (line.contains("eval_loss")) evaluated.push_back(line["step"].get<int64_t>() + 1);
  }
  const auto steps = static_cast<int64_t>(per_epoch);
  EXPECT_EQ(evaluated, (std::vector<int64_t>{steps, 2 * steps, 3 * steps}));
}

TEST_F(ElasticTrain, ELA01_an_epoch_with_fewer_batches_than_a_step_has_micro_batches) {
  const auto ended = shoal(elastic(2, 1) + text(/*batch=*/16) + Line{"--accumulate", "64", "--epochs", "2"});
  ASSERT_EQ(ended.code, 0) << ended.output;
  EXPECT_EQ(read(file("report.json"))["loss"].size(), 2U);
}

// Losses of all steps, in the report and the metrics, and on the test data after each epoch are those of a run in which
// nobody is killed.
void expect_losses_as_alone(const nlohmann::json& report, const std::vector<nlohmann::json>& metrics,
                            const nlohmann::json& alone) {
  ASSERT_EQ(report["loss"].size(), alone["loss"].size());
  for (size_t step = 0; step < alone["loss"].size(); ++step) {
    const auto loss = alone["loss"][step].get<double>();
    EXPECT_NEAR(report["loss"][step].get<double>() / loss, 1, 1e-12) << step;
  }
  std::map<size_t, double> told;
  for (const auto& line : metrics) {
    if (line.contains("loss")) told[line["step"].get<size_t>()] = line["loss"].get<double>();
  }
  EXPECT_GE(told.size() + 1, alone["loss"].size()) << "a rank may be killed before it writes its line";
  for (const auto& [step, loss] : told) EXPECT_NEAR(loss / alone["loss"][step].get<double>(), 1, 1e-12) << step;
  ASSERT_EQ(report["eval"].size(), alone["eval"].size());
  for (size_t epoch = 0; epoch < alone["eval"].size(); ++epoch) {
    EXPECT_NEAR(report["eval"][epoch]["loss"].get<double>(), alone["eval"][epoch]["loss"].get<double>(), 1e-9) << epoch;
  }
}

TEST_P(ElasticStrategies, ELA05_keeps_the_global_batch_when_a_rank_is_killed) {
  const std::string strategy = GetParam();
  // Samples at the end of an epoch fill no step.
  const Line how =
      text(/*batch=*/3) + Line{"--strategy", strategy, "--dtype", "float64", "--epochs",   "3",     "--accumulate",
                               "2",          "--clip", "0.5",     "--eval",  "--schedule", "cosine"};
  const auto ended = disturbed(elastic(3, 1) + how + Line{"--keep-global-batch"}, 10,
                               kill_rank(strategy == "ddp" || strategy == "fsdp" ? 0 : 1));
  ASSERT_EQ(ended.code, 0) << ended.output;
  EXPECT_EQ(event()["ranks"], 2) << ended.output;
  EXPECT_NE(event()["taken_over"].get<std::string>().find("of 6 slices of the batch, the ranks compute 3, 3"),
            std::string::npos);
  const auto alone = shoal(Line{"train", "--ranks", "3", "--threads", "1", "--json", file("alone.json")} + how);
  ASSERT_EQ(alone.code, 0) << alone.output;
  expect_losses_as_alone(read(file("report.json")), lines_of_metrics(), read(file("alone.json")));
}

TEST_F(ElasticTrain, ELA05_ELA06_keeps_the_global_batch_when_a_rank_is_replaced) {
  const Line how = text(5) + Line{"--strategy", "zero2", "--dtype", "float64", "--epochs", "4", "--eval"};
  const auto ended = disturbed(elastic(2, "1:2") + how + Line{"--max-restarts", "1", "--keep-global-batch"}, 10,
                               while_one_stands_still("kill -9 $(" + ranks() + " | sed -n 2p)"));
  ASSERT_EQ(ended.code, 0) << ended.output;
  const auto report = read(file("report.json"));
  ASSERT_EQ(report["elastic"]["changes"].size(), 2U) << ended.output;
  const auto alone = shoal(Line{"train", "--ranks", "2", "--threads", "1", "--json", file("alone.json")} + how);
  ASSERT_EQ(alone.code, 0) << alone.output;
  expect_losses_as_alone(report, lines_of_metrics(), read(file("alone.json")));
}

TEST_F(ElasticTrain, ELA08_a_rank_that_is_stopped_is_killed_and_replaced) {
  // So many that one rank alone is not done before the other has started.
  const Line how = text() + Line{"--strategy", "zero2", "--eval", "--epochs", "16", "--straggler-seconds", "2"};
  const auto ended =
      disturbed(elastic(2, "1:2") + how + Line{"--max-restarts", "1"}, 10,
                "stopped=$(" + ranks() + " | sed -n 2p); kill -STOP $stopped; sleep 20; kill -CONT $stopped");
  ASSERT_EQ(ended.code, 0) << ended.output;
  EXPECT_NE(ended.output.find("is killed: the others have waited for it for more than 2 s"), std::string::npos)
      << ended.output;
  const auto report = read(file("report.json"));
  ASSERT_EQ(report["elastic"]["changes"].size(), 2U) << ended.output;
  EXPECT_EQ(report["elastic"]["changes"][1]["joined"], nlohmann::json::array({2}));
  EXPECT_EQ(report["eval"].size(), 16U) << ended.output;
}

TEST_F(ElasticTrain, ELA10_too_few_ranks_end_the_job_and_every_rank_names_the_last_checkpoint) {
  const auto ended =
      disturbed(elastic(3, 3) + reference() + Line{"--steps", "1000000", "--save-every", "5"}, 40, kill_rank(1));
  EXPECT_EQ(ended.code, 137) << ended.output;
  for (const std::string rank : {"0", "2"}) {
    const std::string says =
        "rank " + rank +
        ": error: 2 of 3 ranks are left, and this elastic job needs min_ranks = 3: start it again "
        "from its last checkpoint; no shard is lost: each rank that is left has all parameters and "
        "their state (the last checkpoint is " +
        saved() + "/step-";
    const auto place = ended.output.find("rank " + rank + ": error");
    EXPECT_NE(ended.output.find(says), std::string::npos) << ended.output.substr(std::min(place, ended.output.size()));
    EXPECT_NE(ended.output.find("; the same command with --resume latest goes on from it"), std::string::npos);
  }
}

TEST_F(ElasticTrain, an_interrupt_after_a_death_leaves_a_checkpoint) {
  const auto ended = disturbed(elastic(3, 1) + reference() + Line{"--steps", "1000000"}, 20,
                               kill_rank(0) + "; sleep 1; kill -INT $pid");
  EXPECT_EQ(ended.code, 130) << ended.output;
  EXPECT_NE(ended.output.find("interrupted; checkpoint in " + saved() + "/step-"), std::string::npos) << ended.output;
  EXPECT_EQ(shoal({"checkpoint", "verify", saved()}).code, 0);
}

TEST_F(ElasticTrain, what_does_not_go_on_is_refused_before_ranks_start) {
  const auto refused = [](const Line& more, const std::string& says) {
    const auto ended = shoal(Line{"train", "--ranks", "2", "--elastic", "1", "--data", "reference"} + more);
    EXPECT_EQ(ended.code, 2) << ended.output;
    EXPECT_NE(ended.output.find(says), std::string::npos) << ended.output;
  };
  const std::string names =
      "ddp, zero1, zero2, megatron, fsdp, fsdp_grad_op, hybrid, hybrid_grad_op, local_sgd, slowmo, diloco, "
      "hybrid_gossip";
  for (const std::string strategy : {"fsdp_no_shard", "decentralized", "local", "none"}) {
    refused({"--strategy", strategy},
            strategy == "none"
                ? "--strategy none"
                : "--strategy " + strategy + " does not go on without a rank that has ended; take one of " + names);
  }
  refused({"--max-restarts", "2"}, "--max-restarts: give --elastic MIN:MAX");
  refused({"--straggler-seconds", "150"},
          "--straggler-seconds 150: give more than 0 and less than half of --timeout 300");
  refused({"--straggler-seconds", "-1"}, "--straggler-seconds -1: give more than 0");
  refused({"--keep-global-batch"}, "--keep-global-batch: reference data has no epochs");
  const auto batch_refused = [&](const Line& more, const std::string& says) {
    const auto ended = shoal(Line{"train", "--ranks", "2", "--keep-global-batch"} + text() + more);
    EXPECT_EQ(ended.code, 2) << ended.output;
    EXPECT_NE(ended.output.find(says), std::string::npos) << ended.output;
    EXPECT_EQ(ended.output.find("rank 1"), std::string::npos) << ended.output;
  };
  batch_refused({}, "--keep-global-batch: give --elastic");
  batch_refused({"--elastic", "1", "--strategy", "diloco"}, "ranks of --strategy diloco have no gradients in common");
  batch_refused({"--elastic", "1:3"}, "4 samples of a step cannot be divided among 3 ranks");
  refused({"--replan", "3:fsdp"}, "--elastic with --replan");
  refused({"--optimizer-in-backward"}, "--elastic with --optimizer-in-backward");
  refused({"--strategy", "zero1", "--dtype", "fp16_mixed"}, "--elastic with --strategy zero1 --dtype fp16_mixed");
  refused({"--strategy", "hybrid", "--transport", "tcp"}, "--elastic with --strategy hybrid --transport tcp");
  refused({"--transport", "mpi"}, "--elastic with --strategy ddp --transport mpi");
  refused({"--device", "cuda"}, "--elastic with --device cuda");
  for (const std::string least : {"0", "3"}) {
    const auto ended = shoal({"train", "--ranks", "2", "--elastic", least, "--data", "reference"});
    EXPECT_EQ(ended.code, 2) << ended.output;
    EXPECT_NE(ended.output.find("--elastic " + least + ": give at "), std::string::npos) << ended.output;
  }
}

}  // namespace
}  // namespace shoal::test::elastic_test
