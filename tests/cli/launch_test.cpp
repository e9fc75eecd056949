// `shoal launch`: any program on N ranks.

#include <gtest/gtest.h>
#include <sched.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "base/processors.h"
#include "tests/cli/launched.h"
#include "tests/support/processes.h"
#include "tests/support/temp_folder.h"

namespace shoal::test::launch_test {
namespace {

TEST(Launch, gives_each_rank_torchruns_variables_and_prefixes_its_lines) {
  const auto ended = launch({"-n", "3", "--", "sh", "-c",
                             "echo $RANK of $WORLD_SIZE local $LOCAL_RANK of $LOCAL_WORLD_SIZE at $MASTER_ADDR; "
                             "printf 'no newline'"});
  EXPECT_EQ(ended.code, 0);
  for (const auto* rank : {"0", "1", "2"}) {
    const std::string r(rank);
    EXPECT_TRUE(contains(ended, "[" + r + "] " + r + " of 3 local " + r + " of 3 at 127.0.0.1\n")) << ended.output;
    EXPECT_TRUE(contains(ended, "[" + r + "] no newline\n")) << ended.output;
  }
}

TEST(Launch, the_words_of_the_program_are_passed_as_they_are) {
  const std::vector<std::string> words{"[1,2]", "", "[]", "[[a],[b]]", "--threads", "3", "--json=x", "--", "-n"};
  std::string all;
  for (const auto& word : words) all += "<" + word + ">";
  for (const bool marked : {true, false}) {
    std::vector<std::string> line{"-n", "1", "--grace=2"};
    if (marked) line.emplace_back("--");
    line.insert(line.end(), {"printf", "<%s>"});
    line.insert(line.end(), words.begin(), words.end());
    const auto ended = launch(line);
    EXPECT_EQ(ended.output, "[0] " + all + "\n") << marked;
  }
  EXPECT_TRUE(contains(launch({"-n", "1", "--lr", "0.1", "true"}), "there is no option --lr"));
  EXPECT_TRUE(contains(launch({"-n", "1", "--"}), "program is required"));
  EXPECT_TRUE(contains(launch({"-n", "1", "--json", "--", "true"}), "--json has no value before --"));
  EXPECT_TRUE(contains(launch({"--help"}), "Usage: shoal launch [OPTIONS] program..."));
}

TEST(Launch, lines_of_python_are_there_when_a_rank_is_killed) {
  const auto ended = run({"env", "-u", "PYTHONUNBUFFERED", SHOAL, "launch", "-n", "1", "--", PYTHON, "-c",
                          "import os; print('written'); os.kill(os.getpid(), 9)"},
                         60);
  EXPECT_TRUE(contains(ended, "[0] written\n")) << ended.output;
}

TEST(Launch, the_first_failure_stops_all_and_its_exit_code_is_kept) {
  const auto ended = launch({"-n", "3", "--grace", "0.5", "--", "sh", "-c", "[ $RANK = 1 ] && exit 7; sleep 50"});
  EXPECT_EQ(ended.code, 7);
  EXPECT_TRUE(contains(ended, "rank 1 ended with exit code 7")) << ended.output;
  EXPECT_LT(ended.seconds, 6);
}

TEST(Launch, a_signal_is_named) {
  const auto ended = launch({"-n", "2", "--grace", "0.5", "--", "sh", "-c", "[ $RANK = 0 ] && kill -9 $$; sleep 50"});
  EXPECT_EQ(ended.code, 128 + 9);
  EXPECT_TRUE(contains(ended, "rank 0 was killed by signal 9 (SIGKILL)")) << ended.output;
}

// Another rank may still be opening what the first one shares.
TEST(Launch, ranks_may_end_right_after_they_have_met) {
  for (int run = 0; run < 10; ++run) {
    const auto ended = launch({"-n", "3", "--", FAULT_RANK, "end_at_once", "0"});
    EXPECT_EQ(ended.code, 0) << ended.output;
  }
}

TEST(Launch, a_program_that_does_not_exist_is_named) {
  const TempFolder folder;
  const auto report = folder.file("report");
  const auto ended = launch({"-n", "2", "--json", report, "--", "no-such-program"});
  EXPECT_EQ(ended.code, 1);
  std::ifstream file(report);
  const std::string text(std::istreambuf_iterator<char>(file), {});
  EXPECT_NE(text.find("\"exit_code\": 1"), std::string::npos) << text;
  EXPECT_TRUE(contains(ended, "error: cannot start 'no-such-program': No such file or directory")) << ended.output;
}

TEST(Launch, a_port_in_use_is_named_before_any_rank_starts) {
  const auto port = std::to_string(free_port());
  const auto ended =
      run_together({{{SHOAL, "launch", "-n", "1", "--port", port, "--", "sleep", "5"}, {}},
                    {{"sh", "-c", "sleep 1; exec " SHOAL " launch -n 1 --port " + port + " -- echo started"}, {}}},
                   20);
  EXPECT_EQ(ended[0].code, 0) << ended[0].output;
  EXPECT_EQ(ended[1].code, 1);
  EXPECT_TRUE(contains(ended[1], "port " + port + " of 127.0.0.1 is in use")) << ended[1].output;
  EXPECT_FALSE(contains(ended[1], "started"));
}

TEST(Launch, cores_are_shared_out_unless_the_environment_says_otherwise) {
  const auto threads = [](const std::string& ranks, const std::string& variables) {
    const Command command{{SHOAL, "launch", "-n", ranks, "--", "sh", "-c", "echo threads $OMP_NUM_THREADS"},
                          variables_of(variables)};
    return run_together({command}, 20).front().output;
  };
  const auto cores = processors();
  const auto saved = std::getenv("OMP_NUM_THREADS") != nullptr ? std::string(std::getenv("OMP_NUM_THREADS")) : "";
  unsetenv("OMP_NUM_THREADS");
  EXPECT_EQ(threads("1", ""), "[0] threads " + std::to_string(cores) + "\n");
  EXPECT_EQ(threads(std::to_string(2 * cores), "").find("threads 1\n"), 4U);
  EXPECT_EQ(threads("1", "OMP_NUM_THREADS=7"), "[0] threads 7\n");
  EXPECT_EQ(threads("1", "OMP_NUM_THREADS=7,2"), "[0] threads 7,2\n") << "for nested teams";
  for (const std::string none : {"0", "2x", "99999999999"}) {
    const auto said = threads("1", "OMP_NUM_THREADS=" + none);  // libgomp may complain
    EXPECT_TRUE(said.ends_with("[0] threads " + std::to_string(cores) + "\n")) << said;
  }
  const auto on_one = run({"taskset", "-c", std::to_string(sched_getcpu()), SHOAL, "launch", "-n", "1", "--", "sh",
                           "-c", "echo threads $OMP_NUM_THREADS"},
                          20);
  EXPECT_EQ(on_one.output, "[0] threads 1\n");
  if (!saved.empty()) setenv("OMP_NUM_THREADS", saved.c_str(), 1);
}

TEST(Launch, pythons_torch_distributed_meets_in_our_store) {
  if (run({PYTHON, "-c", "import torch"}, 60).code != 0) GTEST_SKIP() << "the virtual environment cannot import torch";
  const auto ended = launch({"-n", "2", "--", PYTHON, "-c",
                             "import torch, torch.distributed as d\n"
                             "d.init_process_group('gloo'); t = torch.ones(1) * d.get_rank(); d.all_reduce(t)\n"
                             "print('sum', t.item()); d.destroy_process_group()"});
  EXPECT_EQ(ended.code, 0) << ended.output;
  EXPECT_TRUE(contains(ended, "[1] sum 1.0")) << ended.output;
}

// No rank waits in vain: the launcher reports at the end, or on request, which rank is waited for.
TEST(Launch, flight_recorders_name_the_rank_that_is_waited_for) {
  const TempFolder folder;
  const auto ended = launch({"-n", "3", "--flight-recorder", folder.path(), "--", FAULT_RANK, "forward", "2"});
  EXPECT_EQ(ended.code, 128 + 9);
  EXPECT_TRUE(contains(ended, "shoal: rank 2 never entered #")) << ended.output;
  const auto told = run({SHOAL, "flight", folder.path(), "--last", "2"}, 20);
  EXPECT_EQ(told.code, 0);
  EXPECT_TRUE(contains(told, "rank 2 never entered #")) << told.output;
  EXPECT_TRUE(contains(told, "rank 0 of 3, pid ")) << told.output;
}

TEST(Launch, flight_recorders_of_an_earlier_job_say_nothing_of_this_one) {
  const TempFolder folder;
  launch({"-n", "2", "--flight-recorder", folder.path(), "--", FAULT_RANK, "forward", "1"});
  const auto ended = launch({"-n", "2", "--flight-recorder", folder.path(), "--", "sh", "-c", "exit 5"});
  EXPECT_EQ(ended.code, 5);
  EXPECT_TRUE(contains(ended, "no rank of this job has a flight recorder yet")) << ended.output;
}

TEST(Launch, sigusr1_without_flight_recorders_is_answered) {
  const TempFolder folder;
  const auto ended = run({"sh", "-c",
                          std::string(SHOAL) + " launch -n 1 -- sh -c 'touch " + folder.file("up") +
                              "; sleep 1' & pid=$!; " + until_up(folder, 1) + "kill -USR1 $pid; wait $pid"},
                         20);
  EXPECT_TRUE(contains(ended, "need --flight-recorder FOLDER")) << ended.output;
}

TEST(Launch, the_launcher_of_train_knows_the_flight_recorders_of_the_environment) {
  const TempFolder folder;
  const auto metrics = folder.file("metrics");  // has lines once the job trains
  const auto ended = run({"sh", "-c",
                          "export SHOAL_FLIGHT_RECORDER=" + folder.path().string() + "; " + SHOAL +
                              " train --model mlp --data reference --ranks 2 --steps 100000000 --metrics " + metrics +
                              " & pid=$!; until [ -s " + metrics +
                              " ]; do sleep 0.05; done; kill -USR1 $pid; sleep 0.3; kill -INT $pid; wait $pid"},
                         60);
  EXPECT_EQ(ended.code, 130) << ended.output;
  EXPECT_FALSE(contains(ended, "need --flight-recorder FOLDER")) << ended.output;
  EXPECT_TRUE(contains(ended, " #")) << ended.output;
}

TEST(Launch, sigusr1_asks_the_flight_recorders_of_running_ranks) {
  const TempFolder folder;
  const auto program =
      std::string(SHOAL) + " launch -n 2 --flight-recorder " + folder.path().string() + " -- " + FAULT_RANK;
  const auto ended = run({"sh", "-c", program + " late 1 auto 12 & pid=$!; sleep 8; kill -USR1 $pid; wait $pid"}, 60);
  EXPECT_TRUE(contains(ended, "shoal: rank 1 has not entered #")) << ended.output;
  EXPECT_TRUE(contains(ended, ") runs; ")) << ended.output;
}

}  // namespace
}  // namespace shoal::test::launch_test
