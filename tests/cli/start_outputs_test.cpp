// Places that `shoal train` writes to, its output, and the system's limits.

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "tests/cli/shoal_program.h"
#include "tests/cli/start.h"

namespace shoal::test::start_outputs_test {
namespace {

using namespace start;  // NOLINT(google-build-using-namespace): helpers of this folder's tests

TEST(Start, places_to_write_to_are_looked_at_before_training) {
  const TempFolder folder;
  std::ofstream(folder.file("a_file")) << "x";
  for (const auto* option : {"--json", "--metrics"}) {
    expect_refused(reference({option, folder.file("none/report")}), option);
  }
  for (const auto* option : {"--trace", "--save"}) {
    expect_refused(reference({option, folder.file("a_file/in")}), option);
    expect_refused(reference({option, "/proc"}), std::string(option) + ": cannot write /proc: ");
  }
  std::filesystem::create_directory(folder.file("loop"));
  std::filesystem::create_symlink("latest", folder.file("loop/latest"));
  expect_refused(reference({"--save", folder.file("loop")}), "--save: cannot look at " + folder.file("loop/latest"));
  expect_refused({"bench", "--json", folder.file("none/report")}, "--json: cannot write");
  expect_refused({"bench", "--html", folder.file("none/report")}, "--html: cannot write");
  // The check does not create the file: a training that fails later leaves no empty report.
  const auto report = folder.file("report.json");
  EXPECT_EQ(shoal(reference({"--json", report, "--resume", folder.file("nothing")})).code, 1);
  EXPECT_FALSE(std::filesystem::exists(report));
}

// Without --ranks the script has probably forgotten srun, and on several nodes only that starts ranks on all of them.
TEST(Start, ranks_that_a_batch_script_of_slurm_asks_for_are_started) {
  const std::vector<std::pair<std::string, std::string>> script{
      {"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "2"}, {"SLURM_JOB_ID", "7"}};
  Line line = reference({"--ranks", "1"});
  line.insert(line.begin(), SHOAL);
  const auto ended = run_together({{line, script}}, 60).front();
  EXPECT_EQ(ended.code, 0) << ended.output;
  auto on_two_nodes = script;
  on_two_nodes.emplace_back("SLURM_NNODES", "2");
  expect_one_error(run_together({{line, on_two_nodes}}, 60).front(), 2, "start the program with srun");
  line.resize(line.size() - 2);
  expect_one_error(run_together({{line, script}}, 60).front(), 2, "start the program with srun");
}

// Ranks of a launcher find the places of rank 0 out after they have met, so that none waits for it in vain.
TEST(Start, places_that_rank_0_cannot_write_to_are_an_error_on_all_ranks) {
  const TempFolder folder;
  std::ofstream(folder.file("a_file")) << "x";
  const auto refused = [&](const std::string& option, const std::string& path) {
    const auto ended = shoal({"launch", "-n", "2", "--", SHOAL, "train", "--data", "reference", "--model", "mlp",
                              "--steps", "2", option, folder.file(path)});
    EXPECT_EQ(ended.code, 1) << ended.output;
    for (const std::string rank : {"0", "1"}) {
      const auto said =
          "[" + rank + "] rank " + rank + ": error: rank 0: " + option + ": cannot write " + folder.file(path);
      EXPECT_NE(ended.output.find(said), std::string::npos) << ended.output;
    }
  };
  refused("--save", "a_file/in");
  refused("--metrics", "none/metrics");
  // As on two hosts without a shared file system.
  const auto elsewhere = shoal({"launch", "-n", "2", "--", "sh", "-c",
                                "cd " + folder.path().string() + " && mkdir $RANK && cd $RANK && exec " + SHOAL +
                                    " train --data reference --model mlp --steps 2 --save run"});
  for (const std::string rank : {"0", "1"}) {
    const auto said =
        "[" + rank + "] rank " + rank + ": error: rank 1: --save: run, which rank 0 has made, is not there";
    EXPECT_NE(elsewhere.output.find(said), std::string::npos) << elsewhere.output;
  }
}

// As on a host whose NFS still remembers that there was no such folder.
TEST(Start, a_shared_folder_that_comes_into_sight_a_little_later_is_found) {
  const TempFolder folder;
  const auto ended = shoal({"launch", "-n", "2", "--", "sh", "-c",
                            "cd " + folder.path().string() + " && mkdir $RANK && cd $RANK && if [ $RANK = 1 ]; then " +
                                "(until [ -d ../0/run ]; do sleep 0.02; done; sleep 0.3; ln -s ../0/run run) & fi; " +
                                "exec " SHOAL " train --data reference --model mlp --steps 2 --save run"});
  EXPECT_EQ(ended.code, 0) << ended.output;
}

TEST(Start, outputs_do_not_replace_what_the_command_reads_or_saves) {
  const TempFolder folder;
  const auto text = folder.file("text"), topology = folder.file("topology.json"), save = folder.file("run");
  std::ofstream(text) << std::string(5000, 'x');
  std::ofstream(topology) << R"({"ranks": 2, "rounds": [{"groups": [[0, 1]]}]})";
  for (const std::string name : {"train-images-idx3-ubyte", "train-labels-idx1-ubyte"})
    std::ofstream(folder.file(name)) << "not read before the ranks start";
  for (const std::string option : {"--json", "--metrics"}) {
    SCOPED_TRACE(option);
    expect_refused({"train", "--model", "gpt", "--data", "text:" + text, option, text},
                   option + ": cannot write " + text + ": the command reads");
    const auto labels = folder.file("train-labels-idx1-ubyte");
    expect_refused({"train", "--data", "fashion-mnist:" + folder.file(""), option, labels},
                   option + ": cannot write " + labels + ": the command reads");
    expect_refused(reference({"--strategy", "decentralized", "--topology-file", topology, option, topology}),
                   option + ": cannot write " + topology + ": the command reads");
    for (const std::string saved : {"/latest", "/model.safetensors"})
      expect_refused(reference({"--save", save, option, save + saved}), "are both " + save + saved);
  }
  for (const std::string option : {"--json", "--metrics"}) {
    for (const auto& [of_ranks, name] : {std::pair("--trace", "rank-0.json"), {"--flight-recorder", "rank-1.flight"}})
      expect_refused(reference({of_ranks, folder.file("ranks"), option, folder.file("ranks/../ranks/") + name}),
                     "files of ranks have such names there");
  }
  expect_refused({"launch", "--flight-recorder", save, "--json", save + "/rank-0.flight", "--", "true"},
                 "--json: cannot write " + save + "/rank-0.flight: files of ranks have such names there");
  EXPECT_EQ(std::filesystem::file_size(text), 5000U);
  expect_refused(reference({"--metrics", "-"}), "--metrics -: it does not go to standard output: give a file");
  expect_refused({"bench", "--html", "-"}, "--html -: it does not go to standard output: give a file");
}

// Output that is still possible is written.
TEST(Start, a_place_that_vanishes_during_training_is_an_error_at_the_end) {
  const TempFolder folder;
  const auto line = std::string(SHOAL) + " train --data reference --model mlp --steps 1500 --ranks 2 --json " +
                    folder.file("gone/report") + " --metrics " + folder.file("metrics") + " --save " +
                    folder.file("run");
  const auto ended =
      run({"sh", "-c",
           "mkdir " + folder.file("gone") + "; " + line + " & pid=$!; until [ -s " + folder.file("metrics") +
               " ]; do sleep 0.02; done; rmdir " + folder.file("gone") + "; wait $pid"},
          60);
  EXPECT_EQ(ended.code, 1);
  EXPECT_NE(ended.output.find("error: cannot write " + folder.file("gone/report")), std::string::npos) << ended.output;
  EXPECT_NE(ended.output.find("1500 steps in"), std::string::npos) << ended.output;
  EXPECT_TRUE(std::filesystem::exists(folder.file("run/model.safetensors")));
  EXPECT_TRUE(std::filesystem::exists(folder.file("run/step-1500/index.json")));
}

TEST(Start, a_full_disk_under_the_metrics_costs_neither_the_checkpoint_nor_the_report) {
  const TempFolder folder;
  const auto ended = shoal(reference(
      {"--ranks", "1", "--metrics", "/dev/full", "--save", folder.file("run"), "--json", folder.file("report")}));
  EXPECT_EQ(ended.code, 0) << ended.output;
  EXPECT_NE(
      ended.output.find("/dev/full: No space left on device; lines from step 0 on are missing; training continues"),
      std::string::npos)
      << ended.output;
  EXPECT_TRUE(std::filesystem::exists(folder.file("run/step-2/index.json")));
  EXPECT_EQ(read(folder.file("report"))["loss"].size(), 2U);
}

TEST(Start, standard_streams_that_are_closed_or_full_lose_nothing_in_silence) {
  const auto train = std::string(SHOAL) + " train --data reference --model mlp --steps 2 --ranks 2 --json ";
  const TempFolder folder;
  auto ended = run({"sh", "-c", train + folder.file("report") + " <&- >&- 2>&-"}, 60);
  EXPECT_EQ(ended.code, 0);
  EXPECT_EQ(read(folder.file("report"))["loss"].size(), 2U);
  ended = run({"sh", "-c", train + "- > /dev/full"}, 60);
  EXPECT_EQ(ended.code, 1);
  EXPECT_NE(ended.output.find("error: cannot write to standard output: "), std::string::npos) << ended.output;
  // With this option it says that there is no checkpoint yet.
  const auto saves = " train --data reference --model mlp --steps 2 --ranks 1 --resume latest --save ";
  ended = run({"sh", "-c", SHOAL + (saves + folder.file("run")) + " 2> /dev/full"}, 60);
  EXPECT_EQ(ended.code, 0) << ended.output;
  EXPECT_TRUE(std::filesystem::exists(folder.file("run/step-2/index.json")));
  EXPECT_EQ(run({"sh", "-c", std::string(SHOAL) + " train --no 2> /dev/full"}, 60).code, 2);
}

// As `shoal launch` tells its ranks to stop, of `| head` and of a collector of logs that has crashed.
TEST(Start, training_whose_output_nobody_reads_any_more_saves_and_stops) {
  const TempFolder folder;
  std::ofstream(folder.file("text.txt")) << std::string(6000, 'a') + std::string(6000, 'b');
  const auto unread = [&](const std::string& options) {
    return run({"sh", "-c", "{ " + std::string(SHOAL) + " train --ranks 2 " + options + "; echo code $? >&2; } | true"},
               60);
  };
  for (const std::string more : {"", " --elastic 1:2"}) {
    const auto save = folder.file("run" + std::to_string(more.size()));
    const auto ended =
        unread("--model gpt --eval --epochs 50 --data text:" + folder.file("text.txt") + " --save " + save + more);
    EXPECT_NE(ended.output.find("shoal: nobody reads the output any more: training stops\n"), std::string::npos)
        << ended.output;
    EXPECT_NE(ended.output.find("interrupted; checkpoint in " + save + "/step-"), std::string::npos) << ended.output;
    EXPECT_TRUE(ended.output.ends_with("\ncode 1\n")) << ended.output;
    EXPECT_EQ(ended.output.find("no rank has ended well"), std::string::npos) << ended.output;
    EXPECT_TRUE(std::filesystem::exists(save + "/latest"));
  }
  for (const std::string more : {"", " --elastic 1", " --strategy decentralized"}) {
    const auto report = folder.file("report" + std::to_string(more.size()));
    const auto ended = unread("--data reference --model mlp --steps 2 --json " + report + more);
    EXPECT_NE(ended.output.find("error: cannot write to standard output: Broken pipe\n"), std::string::npos)
        << ended.output;
    EXPECT_TRUE(ended.output.ends_with("\ncode 1\n")) << ended.output;
    EXPECT_EQ(read(report)["loss"].size(), 2U);
  }
}

// The limit applies to the shell and everything that it starts.
Ended with_limit(const std::string& limit, const std::string& line) {
  return run({"sh", "-c", "ulimit " + limit + "; exec " + SHOAL + " " + line}, 60);
}

TEST(Start, few_open_files_are_one_named_error) {
  const std::string train = "train --data reference --model mlp --steps 2 --ranks 2";
  expect_one_error(with_limit("-n 8", train), 2, "a process may have 8 files open here, and 2 ranks need 34 at least");
  expect_one_error(with_limit("-n 8", "launch -n 2 -- true"), 1, "ulimit -n");
  expect_one_error(with_limit("-n 16", "bench --ops barrier --rounds 1"), 1, "ulimit -n");
  EXPECT_EQ(with_limit("-n 34", train).code, 0) << "the least is enough";
  EXPECT_EQ(with_limit("-n 34", "launch -n 2 -- true").code, 0);
}

// In blocks of 512 bytes: 100 MiB.
TEST(Start, small_files_are_one_named_error) {
  const std::string train = "train --data reference --model mlp --steps 2 --ranks 2";
  expect_one_error(with_limit("-f 204800", train), 2, "ulimit -f");
  EXPECT_EQ(with_limit("-f 204800", train + " --transport gloo").code, 0);
}

// A checkpoint exceeds the limit: the training ends, and reports why.
TEST(Start, a_file_that_may_not_grow_is_an_error) {
  const TempFolder folder;
  const auto ended = with_limit(
      "-f 64", "train --data reference --model mlp --steps 2 --ranks 1 --strategy none --save " + folder.file("run"));
  EXPECT_EQ(ended.code, 1) << ended.output;
  EXPECT_NE(ended.output.find("File too large"), std::string::npos) << ended.output;
}

}  // namespace
}  // namespace shoal::test::start_outputs_test
