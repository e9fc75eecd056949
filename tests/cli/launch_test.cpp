// `shoal launch`: any program on N ranks, with no process left behind.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <thread>

#include "tests/cli/launched.h"
#include "tests/support/processes.h"
#include "tests/support/temp_folder.h"

namespace shoal::test::launch_test {
namespace {

// Zombies that are not reaped yet count as dead.
bool lives(int pid) {
  std::ifstream stat("/proc/" + std::to_string(pid) + "/stat");
  std::string number, name, state;
  return stat >> number >> name >> state && state != "Z";
}

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

// Launchers of two nodes with two ranks each, here on one host.
std::vector<Ended> launch_nodes(const std::vector<std::string>& arguments) {
  const auto port = std::to_string(free_port());
  std::vector<Command> commands;
  for (const auto* node : {"0", "1"}) {
    Command command{{SHOAL, "launch", "-n", "2", "--nnodes", "2", "--node-rank", node, "--port", port}, {}};
    command.arguments.insert(command.arguments.end(), arguments.begin(), arguments.end());
    commands.push_back(std::move(command));
  }
  return run_together(commands, 60);
}

TEST(Launch, SCA09_launchers_of_several_nodes_start_one_job) {
  const auto echoed = launch_nodes(
      {"--", "sh", "-c", "echo $RANK of $WORLD_SIZE local $LOCAL_RANK of $LOCAL_WORLD_SIZE node $GROUP_RANK"});
  for (const int node : {0, 1}) {
    EXPECT_EQ(echoed[node].code, 0) << echoed[node].output;
    for (const int local : {0, 1}) {
      const auto rank = std::to_string(2 * node + local);
      const auto line = "[" + rank + "] " + rank + " of 4 local " + std::to_string(local) + " of 2 node " +
                        std::to_string(node) + "\n";
      EXPECT_TRUE(contains(echoed[node], line)) << echoed[node].output;
    }
  }
  const auto trained = launch_nodes({"--", SHOAL, "train", "--model", "mlp", "--data", "reference", "--steps", "3"});
  for (const auto& ended : trained) EXPECT_EQ(ended.code, 0) << ended.output;
  EXPECT_TRUE(contains(trained[0], "last loss")) << trained[0].output;
}

// The store must be there until the last node's ranks have ended.
TEST(Launch, SCA09_the_launcher_with_the_store_waits_for_the_others) {
  const auto ended = launch_nodes({"--", "sh", "-c", "[ $GROUP_RANK = 1 ] && sleep 2; echo done"});
  EXPECT_EQ(ended[0].code, 0) << ended[0].output;
  EXPECT_GT(ended[0].seconds, 1.9);
  EXPECT_LT(ended[0].seconds, 6);
}

TEST(Launch, SCA09_a_failure_on_one_node_ends_the_ranks_of_the_other) {
  for (const auto* victim : {"0", "3"}) {
    const auto ended = launch_nodes(
        {"--grace", "0.5", "--", "sh", "-c", std::string("[ $RANK = ") + victim + " ] && exit 7; sleep 50"});
    const int node = victim[0] == '0' ? 0 : 1;
    EXPECT_EQ(ended[node].code, 7) << ended[node].output;
    EXPECT_EQ(ended[1 - node].code, 1) << ended[1 - node].output;
    const auto why = std::string("on another node rank ") + victim + " ended with exit code 7";
    EXPECT_TRUE(contains(ended[1 - node], why)) << ended[1 - node].output;
    for (const auto& one : ended) EXPECT_LT(one.seconds, 8);
  }
}

// They would wait for it for 60 s.
TEST(Launch, ELA01_a_rank_that_ends_before_an_elastic_job_begins_is_named_at_once) {
  const std::string train = std::string(SHOAL) + " train --model mlp --data reference --steps 5 --elastic 1";
  const auto dies = [&](int rank) { return "[ $RANK = " + std::to_string(rank) + " ] && exit 3; exec " + train; };
  const auto alone = run({SHOAL, "launch", "-n", "3", "--elastic", "1", "--", "sh", "-c", dies(1)}, 50);
  const auto nodes = launch_nodes({"--elastic", "1", "--", "sh", "-c", dies(3)});
  EXPECT_TRUE(contains(alone, "rank 1 has ended, as its launcher says, before it appeared")) << alone.output;
  EXPECT_TRUE(contains(nodes[0], "rank 3 has ended, as its launcher says, before it appeared")) << nodes[0].output;
  for (const auto& one : {alone, nodes[0], nodes[1]}) {
    EXPECT_NE(one.code, 0);
    EXPECT_LT(one.seconds, 25);
  }
}

// Also of node 0, whose launcher has the store.
TEST(Launch, ELA01_an_elastic_job_goes_on_when_all_ranks_of_a_node_have_failed) {
  const TempFolder folder;
  for (const int node : {1, 0}) {
    const auto metrics = folder.file("metrics" + std::to_string(node));  // has lines once the job trains
    const auto train =
        std::string(SHOAL) + " train --model mlp --data reference --steps 6000 --elastic 1 --metrics " + metrics;
    const auto killed = "[ $GROUP_RANK = " + std::to_string(node) + " ] && (until [ -s " + metrics +
                        " ]; do sleep 0.05; done; kill -9 $$) & exec " + train;
    const auto ended = launch_nodes({"--elastic", "1", "--", "sh", "-c", killed});
    EXPECT_EQ(ended[1 - node].code, 0) << ended[1 - node].output;
    EXPECT_EQ(ended[node].code, 128 + 9) << ended[node].output;
    EXPECT_TRUE(contains(ended[1 - node], "2 ranks go on")) << ended[1 - node].output;
    EXPECT_GT(ended[0].seconds, ended[1].seconds - 1) << "the store ends first";
  }
}

// Before a program has its Elastic, whose min_ranks would end it.
TEST(Launch, ELA10_fewer_ranks_than_the_least_are_left_on_all_nodes) {
  const auto ended = launch_nodes(
      {"--elastic", "3", "--grace", "0.5", "--", "sh", "-c", "[ $GROUP_RANK = 1 ] && exit 7; exec sleep 50"});
  EXPECT_EQ(ended[1].code, 7) << ended[1].output;
  EXPECT_NE(ended[0].code, 0) << ended[0].output;
  for (const auto& one : ended) EXPECT_LT(one.seconds, 10) << one.output;
}

TEST(Launch, SCA09_an_interrupt_ends_a_launcher_that_waits_for_the_other_nodes) {
  const auto port = std::to_string(free_port());
  const auto line = [&](const std::string& node, const std::string& program) {
    return std::string(SHOAL) + " launch --nnodes 2 -n 1 --node-rank " + node + " --port " + port + " -- " + program;
  };
  // Node 0's rank has ended, and its launcher waits for node 1's, with the store.
  const test::TempFolder folder;
  const auto first = folder.file("first_has_ended");
  const auto ended =
      run({"sh", "-c",
           line("1", "sleep 20") + " & other=$!; " + line("0", "touch " + first) + " & pid=$!; while [ ! -e " + first +
               " ]; do sleep 0.1; done; sleep 1; kill -0 $pid && echo it waits; kill -INT $pid; "
               "wait $pid; echo code $?; kill -INT $other; wait $other"},
          30);
  EXPECT_TRUE(contains(ended, "it waits")) << ended.output;
  EXPECT_TRUE(contains(ended, "code 130")) << ended.output;
  EXPECT_LT(ended.seconds, 18) << "before node 1's has ended";
}

TEST(Launch, SCA09_options_of_several_nodes_are_checked) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> refused = {
      {{"--nnodes", "2"}, "several nodes: give all launchers the same port"},
      {{"--nnodes", "2", "--node-rank", "2", "--port", "29500"}, "node 2 of 2"},
      {{"--nnodes", "0"}, "0 nodes: give at least 1"},
      {{"--address", "[::1]"}, "--address [::1]: "},
      {{"--threads", "100000"}, "100000 threads: give 1 to 1024"},
      {{"--json", "-"}, "--json -: it does not go to standard output"},
      {{"--node-rank", "1"}, "node 1 of 1"},
      {{"--nnodes", "2000000000", "-n", "2", "--port", "29500"}, "give at most"},
      {{"--nnodes", "2", "--port", "29500", "--elastic", "2:3"}, "up to 3 ranks in an elastic job that begins with 4"},
      {{"--join"}, "give the job's address and port"},
      {{"--join", "--port", "29500", "--nnodes", "2"}, "gets its number from the job"},
      {{"--join", "--port", "29500", "--elastic", "1:4"}, "leave the limits of ranks out"},
      {{"--nnodes", "2", "--port", "29500", "--elastic", "5"}, "at least 5 ranks of 4"}};
  for (auto [arguments, text] : refused) {
    arguments.insert(arguments.end(), {"--", "true"});
    const auto ended = launch(arguments);
    EXPECT_NE(ended.code, 0);
    EXPECT_TRUE(contains(ended, text)) << ended.output;
  }
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

TEST(Launch, ELA01_an_elastic_job_goes_on_while_enough_ranks_are_left) {
  const std::vector<std::string> command = {
      "--grace", "0.5", "--", "sh", "-c", "[ $RANK = 1 ] && kill -9 $$; sleep 2; echo rank $RANK is done"};
  const auto launch_elastic = [&](const std::string& least) {
    std::vector<std::string> arguments = {"-n", "3", "--elastic", least};
    arguments.insert(arguments.end(), command.begin(), command.end());
    return launch(arguments);
  };
  const auto enough = launch_elastic("2");
  EXPECT_EQ(enough.code, 0) << enough.output;
  for (const auto* text : {"rank 1 was killed by signal 9", "rank 0 is done", "rank 2 is done"}) {
    EXPECT_TRUE(contains(enough, text)) << enough.output;
  }
  const auto too_few = launch_elastic("3");
  EXPECT_EQ(too_few.code, 128 + 9);
  EXPECT_FALSE(contains(too_few, "is done")) << too_few.output;
  EXPECT_TRUE(contains(launch({"-n", "2", "--elastic", "3", "--", "true"}), "at least 3 ranks of 2")) << "refused";
}

// Nobody has gone on without these: one saved alone when the others had ended, or one ended long before the others failed.
TEST(Launch, ELA01_an_elastic_job_whose_last_rank_fails_has_failed) {
  const auto saves =
      launch({"-n", "3", "--elastic", "1", "--", "sh", "-c", "[ $RANK = 0 ] && { sleep 1; exit 3; }; true"});
  EXPECT_EQ(saves.code, 3) << saves.output;
  EXPECT_TRUE(contains(saves, "no rank has ended well since then")) << saves.output;
  const auto killed =
      launch({"-n", "3", "--elastic", "1", "--", "sh", "-c", "[ $RANK = 2 ] && exit; sleep 1; kill -9 $$"});
  EXPECT_EQ(killed.code, 128 + 9) << killed.output;
  const auto goes_on = launch({"-n", "3", "--elastic", "1", "--", "sh", "-c",
                               "[ $RANK = 2 ] && exit; sleep $RANK.5; [ $RANK = 0 ] && kill -9 $$; true"});
  EXPECT_EQ(goes_on.code, 0) << goes_on.output;
}

// The newcomers fail before they join: that is no failure of the job.
TEST(Launch, ELA06_a_rank_is_started_in_place_of_a_failed_one_so_often) {
  const auto ended = launch({"-n", "2", "--elastic", "1:3", "--max-restarts", "2", "--", "sh", "-c",
                             "[ -n \"$SHOAL_JOIN\" ] && { echo newcomer $RANK; exit 3; }; [ $RANK = 1 ] && kill -9 $$; "
                             "sleep 2; echo rank $RANK is done"});
  EXPECT_EQ(ended.code, 0) << ended.output;
  for (const auto* text : {"is started to join the job (in place of rank 1, restart 1 of 2)", "[2] newcomer 2",
                           "rank 2 ended with exit code 3 before it had joined the job",
                           "(in place of rank 2, restart 2 of 2)", "[3] newcomer 3", "rank 0 is done"}) {
    EXPECT_TRUE(contains(ended, text)) << text << " in " << ended.output;
  }
  EXPECT_FALSE(contains(ended, "newcomer 4")) << ended.output;
}

TEST(Launch, ELA06_no_rank_is_replaced_after_three_in_a_row_that_have_not_joined) {
  const auto ended = launch({"-n", "2", "--elastic", "1:3", "--max-restarts", "9", "--", "sh", "-c",
                             "[ -n \"$SHOAL_JOIN\" ] && { echo newcomer $RANK; exit 3; }; [ $RANK = 1 ] && kill -9 $$; "
                             "sleep 2; echo rank $RANK is done"});
  EXPECT_EQ(ended.code, 0) << ended.output;
  EXPECT_TRUE(contains(ended, "newcomer 4")) << ended.output;
  EXPECT_TRUE(contains(ended, "rank 4 is not replaced: the last 3 ranks that were started")) << ended.output;
  EXPECT_FALSE(contains(ended, "newcomer 5")) << ended.output;
  const auto quiet = launch({"-n", "2", "--elastic", "1:3", "--max-restarts", "1", "--", "sh", "-c",
                             "[ -n \"$SHOAL_JOIN\" ] && exit 0; [ $RANK = 1 ] && kill -9 $$; sleep 1"});
  EXPECT_EQ(quiet.code, 0) << quiet.output;
  EXPECT_TRUE(contains(quiet, "ended, and has not joined the job")) << quiet.output;
}

TEST(Launch, ELA06_a_replacement_that_cannot_be_started_costs_the_job_nothing) {
  const TempFolder folder;
  const auto program = (folder.path() / "program").string();
  std::ofstream(program) << "#!/bin/sh\n[ $RANK = 1 ] && { rm " << program
                         << "; kill -9 $$; }\nsleep 1\necho rank $RANK is done\n";
  ASSERT_EQ(std::system(("chmod +x " + program).c_str()), 0);
  const auto ended = launch({"-n", "2", "--elastic", "1:2", "--max-restarts", "3", "--", program});
  EXPECT_EQ(ended.code, 0) << ended.output;
  EXPECT_TRUE(contains(ended, "no rank is added (in place of rank 1, restart 1 of 3): cannot start")) << ended.output;
  EXPECT_TRUE(contains(ended, "rank 0 is done")) << ended.output;
}

// The newcomer waits to join until the others have ended.
TEST(Launch, ELA06_SIGUSR2_adds_a_rank_up_to_the_maximum) {
  const auto ended =
      launch({"-n", "2", "--elastic", "1:3", "--", "sh", "-c",
              "[ $RANK = 2 ] && { echo newcomer of $WORLD_SIZE: $SHOAL_JOIN; sleep 50; }; "
              "[ $RANK = 0 ] && { kill -USR2 $PPID; sleep 1; kill -USR2 $PPID; }; sleep 2; echo rank $RANK is done"});
  EXPECT_EQ(ended.code, 0) << ended.output;
  EXPECT_LT(ended.seconds, 20);
  for (const auto* text : {"is started to join the job (SIGUSR2; several that come together count once)",
                           "[2] newcomer of 3: 2 ", "the job has 3 processes, the most that --elastic allows",
                           "rank 0 is done", "rank 1 is done", "was to join a job that has ended"}) {
    EXPECT_TRUE(contains(ended, text)) << text << " in " << ended.output;
  }
  const auto shrinks_only = launch({"-n", "1", "--elastic", "1", "--", "sh", "-c", "kill -USR2 $PPID; sleep 0.5"});
  EXPECT_EQ(shrinks_only.code, 0);
  EXPECT_TRUE(contains(shrinks_only, "SIGUSR2 adds a rank to a job of --elastic MIN:MAX")) << shrinks_only.output;
}

// A job that a newcomer starts is another one, which it does not join. shoal train joins none.
TEST(Launch, ELA06_a_newcomer_starts_a_job_of_its_own) {
  const TempFolder folder;
  const std::string train = std::string(SHOAL) + " train --model mlp --data reference --steps 2";
  const auto ended = launch(
      {"-n", "1", "--elastic", "1:2", "--", "sh", "-c",
       "if [ $RANK = 0 ]; then kill -USR2 $PPID; while ! [ -e $0 ]; do sleep 0.2; done; else " + std::string(SHOAL) +
           " launch -n 2 -- " + train + " && echo nested job is done; " + train + "; touch $0; sleep 50; fi",
       (folder.path() / "ended").string()},
      120);
  EXPECT_EQ(ended.code, 0) << ended.output;
  EXPECT_TRUE(contains(ended, "nested job is done")) << ended.output;
  EXPECT_TRUE(contains(ended, "shoal train cannot join a running job")) << ended.output;
}

TEST(Launch, ELA06_limits_of_an_elastic_job_are_checked) {
  EXPECT_TRUE(contains(launch({"-n", "3", "--elastic", "1:2", "--", "true"}), "give 3 to 1024")) << "fewer than begin";
  EXPECT_TRUE(contains(launch({"-n", "3", "--elastic", "1:2000", "--", "true"}), "give 3 to 1024"));
  EXPECT_TRUE(contains(launch({"-n", "3", "--elastic", "2", "--keep-going", "--", "true"}), "give one of them"));
  EXPECT_TRUE(contains(launch({"-n", "3", "--elastic", "x", "--", "true"}), "give MIN or MIN:MAX"));
  EXPECT_TRUE(contains(launch({"-n", "3", "--elastic", "1:", "--", "true"}), "give MIN or MIN:MAX"));
  EXPECT_TRUE(
      contains(launch({"-n", "3", "--elastic", "1", "--max-restarts", "2", "--", "true"}), "--elastic MIN:MAX"));
  const auto files = run(
      {"sh", "-c", std::string("ulimit -n 64; exec ") + SHOAL + " launch -n 2 --elastic 1:8 --max-restarts 20 -- true"},
      20);
  EXPECT_TRUE(contains(files, "28 ranks need 112 at least")) << files.output;
}

TEST(Launch, a_rank_killed_in_training_is_named_by_the_others_and_by_the_launcher) {
  for (const auto* point : {"forward", "backward", "all_reduce"}) {
    for (const auto* victim : {"0", "2"}) {
      SCOPED_TRACE(std::string(point) + ", rank " + victim);
      const auto ended = launch({"-n", "3", "--", FAULT_RANK, point, victim});
      EXPECT_EQ(ended.code, 128 + 9);
      EXPECT_TRUE(contains(ended, std::string("rank ") + victim + " was killed by signal 9")) << ended.output;
      for (const std::string other : {"0", "1", "2"}) {
        if (other == victim) continue;
        EXPECT_TRUE(contains(ended, "[" + other + "] error: rank " + victim + " ")) << ended.output;
      }
    }
  }
}

// Another rank may still be opening what the first one shares.
TEST(Launch, ranks_may_end_right_after_they_have_met) {
  for (int run = 0; run < 10; ++run) {
    const auto ended = launch({"-n", "3", "--", FAULT_RANK, "end_at_once", "0"});
    EXPECT_EQ(ended.code, 0) << ended.output;
  }
}

// The stopped launcher serves the store, forwards output and reaps the ranks; the ranks can only watch each other.
TEST(Launch, ranks_of_a_launcher_that_is_stopped_name_the_one_that_is_killed) {
  for (const std::string transport : {"host", "gloo"}) {
    SCOPED_TRACE(transport);
    // Zombies count as ended. Reports that they are, or after 30 s that they are not, and continues the launcher.
    const auto ended =
        run({"sh", "-c", std::string(SHOAL) + " launch -n 3 -- " + FAULT_RANK + " launcher 1 " + transport + R"( 10 &
      launcher=$!
      zombies() { cat /proc/[0-9]*/stat 2>/dev/null | grep "(fault_rank) Z $launcher " | wc -l; }
      until [ $(zombies) -gt 0 ]; do sleep 0.1; done
      began=$(date +%s)
      until [ $(zombies) = 3 ] || [ $(date +%s) -gt $((began + 30)) ]; do sleep 0.1; done
      echo "$(zombies) ended within $(($(date +%s) - began)) s"
      kill -CONT $launcher
      wait $launcher)"},
            90);
    EXPECT_NE(ended.code, 0) << ended.output;
    for (const std::string rank : {"0", "2"}) {
      EXPECT_TRUE(contains(ended, "[" + rank + "] error: rank 1 ")) << ended.output;
    }
    const auto said = ended.output.find("3 ended within ");
    ASSERT_NE(said, std::string::npos) << ended.output;
    EXPECT_LE(std::stoi(ended.output.substr(said + 15)), 12) << ended.output;
  }
}

TEST(Launch, ranks_that_ignore_sigterm_are_killed) {
  const auto ended = launch({"-n", "2", "--grace", "0.2", "--", "sh", "-c",
                             "trap '' TERM; [ $RANK = 0 ] && exit 3; sleep 50 & wait; wait; sleep 50"});
  EXPECT_EQ(ended.code, 3);
  EXPECT_LT(ended.seconds, 10);
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
      run_together({{{SHOAL, "launch", "-n", "1", "--port", port, "--", "sleep", "2"}, {}},
                    {{"sh", "-c", "sleep 1; exec " SHOAL " launch -n 1 --port " + port + " -- echo started"}, {}}},
                   20);
  EXPECT_EQ(ended[0].code, 0) << ended[0].output;
  EXPECT_EQ(ended[1].code, 1);
  EXPECT_TRUE(contains(ended[1], "port " + port + " of 127.0.0.1 is in use")) << ended[1].output;
  EXPECT_FALSE(contains(ended[1], "started"));
}

TEST(Launch, no_rank_outlives_a_launcher_that_is_killed) {
  const TempFolder folder;
  const auto pids = folder.file("pids");
  const auto ended =
      run({"sh", "-c",
           std::string(SHOAL) + " launch -n 2 -- sh -c 'echo $$ >> " + pids + "; exec sleep 50' & " +
               "until [ \"$(cat " + pids + " 2>/dev/null | wc -l)\" = 2 ]; do sleep 0.05; done; kill -9 $!; sleep 1"},
          20);
  std::ifstream file(pids);
  int pid = 0;
  int count = 0;
  while (file >> pid) {
    ++count;
    EXPECT_FALSE(lives(pid)) << "rank with pid " << pid;
  }
  EXPECT_EQ(count, 2);
}

// The pids in `file` of processes that still live.
std::vector<int> living(const std::string& file) {
  std::ifstream pids(file);
  std::vector<int> list;
  for (int pid = 0; pids >> pid;) {
    if (lives(pid)) list.push_back(pid);
  }
  return list;
}

size_t pids_in(const std::string& file) {
  std::ifstream pids(file);
  return static_cast<size_t>(std::distance(std::istream_iterator<int>(pids), {}));
}

// Command of ranks that start a process in their group and one in its own session, and write their pids.
std::string starts_others(const std::string& pids) {
  return "sh -c 'sleep 300 & echo $! >> " + pids + "; setsid sh -c \"echo \\$\\$ >> " + pids +
         "; exec sleep 300\" & echo $$ >> " + pids + "; wait'";
}

TEST(Launch, what_ranks_have_started_ends_with_a_launcher_that_is_killed_or_hung_up) {
  for (const auto* signal : {"KILL", "HUP", "TERM"}) {
    SCOPED_TRACE(signal);
    const TempFolder folder;
    const auto pids = folder.file("pids");
    run({"sh", "-c",
         std::string(SHOAL) + " launch -n 2 --stop-grace 1 -- " + starts_others(pids) + " & pid=$!; sleep 1.5; kill -" +
             signal + " $pid; sleep 2"},
        20);
    EXPECT_EQ(pids_in(pids), 6U);
    EXPECT_TRUE(living(pids).empty());
  }
}

TEST(Launch, what_ranks_have_started_ends_with_the_job) {
  const TempFolder folder;
  const auto pids = folder.file("pids");
  const auto ended = launch(
      {"-n", "1", "--", "sh", "-c", "setsid sh -c 'echo $$ >> " + pids + "; exec sleep 300' & sleep 1; echo done"});
  EXPECT_EQ(ended.code, 0);
  EXPECT_TRUE(contains(ended, "done")) << ended.output;
  EXPECT_EQ(pids_in(pids), 1U);
  EXPECT_TRUE(living(pids).empty());
}

// Among others by the kernel, which is short of memory.
TEST(Launch, a_job_whose_watcher_is_killed_goes_on_and_leaves_nothing) {
  const TempFolder folder;
  const auto pids = folder.file("pids");
  const auto ended = launch({"-n", "2", "--", "sh", "-c",
                             "setsid sh -c 'echo $$ >> " + pids +
                                 "; exec sleep 300' & sleep 0.5; if [ $RANK = 0 ]; then "
                                 "for child in $(cat /proc/$PPID/task/$PPID/children); do "
                                 "grep -q shoal-watcher /proc/$child/comm && kill -9 $child; done; true; "
                                 "else sleep 1; echo went on; fi"});
  EXPECT_EQ(ended.code, 0) << ended.output;
  EXPECT_TRUE(contains(ended, "its process shoal-watcher has been killed")) << ended.output;
  EXPECT_TRUE(contains(ended, "went on")) << ended.output;
  EXPECT_EQ(pids_in(pids), 2U);
  EXPECT_TRUE(living(pids).empty());
}

// Daemons ignore SIGCHLD, which programs that they start inherit.
TEST(Launch, ranks_are_seen_to_end_though_the_caller_ignores_its_children) {
  const auto ended =
      run({"sh", "-c", std::string("trap '' CHLD; exec ") + SHOAL + " launch -n 2 -- sh -c 'exit 3'"}, 20);
  EXPECT_EQ(ended.code, 3) << ended.output;
}

TEST(Launch, a_file_that_is_written_at_the_end_may_be_a_pipe_or_a_link_to_nothing_yet) {
  const TempFolder folder;
  const auto pipe = folder.file("pipe"), got = folder.file("got");
  const auto piped = run({"sh", "-c",
                          "mkfifo " + pipe + "; cat " + pipe + " > " + got + " & " + SHOAL + " launch -n 1 --json " +
                              pipe + " -- true; code=$?; wait; grep -q exit_code " + got + " && exit $code; exit 99"},
                         20);
  EXPECT_EQ(piped.code, 0) << piped.output;
  const auto link = folder.file("link");
  std::filesystem::create_symlink(folder.file("target"), link);
  EXPECT_EQ(launch({"-n", "1", "--json", link, "--", "true"}).code, 0);
  EXPECT_TRUE(std::filesystem::is_symlink(link));
  EXPECT_GT(std::filesystem::file_size(folder.file("target")), 10U);
}

TEST(Launch, a_progress_bar_is_seen_while_it_moves) {
  const auto ended = run({"sh", "-c",
                          std::string(SHOAL) + " launch -n 1 -- sh -c 'printf \"1%%\\r2%%\\r\"; sleep 5; echo end' | "
                                               "(sleep 2; timeout 1 head -c 14)"},
                         20);
  EXPECT_EQ(ended.output.substr(0, 14), "[0] 1%\r[0] 2%\r");
  const auto windows = launch({"-n", "1", "--", "printf", "a\\r\\nb\\r\\n"});
  EXPECT_EQ(windows.output, "[0] a\r\n[0] b\r\n");
}

TEST(Launch, a_line_without_an_end_is_forwarded_in_time_and_without_memory) {
  const auto ended =
      run({"sh", "-c",
           std::string("(ulimit -v 8000000; exec ") + SHOAL + " launch -n 1 -- head -c 400000000 /dev/zero) | wc -c"},
          60);
  EXPECT_EQ(ended.output, "400000005\n");  // "[0] " and the last "\n" belong to it
  EXPECT_FALSE(ended.overdue);
}

TEST(Launch, a_reader_that_has_stopped_cannot_hold_the_launcher) {
  const TempFolder folder;
  const auto ended = run(
      {"sh", "-c",
       "{ " + std::string(SHOAL) + " launch -n 2 -- sh -c 'touch " + folder.file("up") + "$RANK; exec yes' & pid=$!; " +
           until_up(folder, 2) + "sleep 1; kill -TERM $pid; wait $pid; echo ended with $? >&2; } | sleep 12"},
      30);
  EXPECT_TRUE(contains(ended, "ended with 130")) << ended.output;
}

// A terminal takes less than it is given although it is ready.
TEST(Launch, a_terminal_that_nobody_reads_cannot_hold_the_launcher) {
  for (const auto* signal : {"TERM", "HUP"}) {
    const TempFolder folder;
    const int reader = posix_openpt(O_RDWR | O_NOCTTY);
    ASSERT_TRUE(reader >= 0 && grantpt(reader) == 0 && unlockpt(reader) == 0);
    const auto ended = run({"sh", "-c",
                            std::string(SHOAL) + " launch -n 2 -- sh -c 'touch " + folder.file("up") +
                                "$RANK; exec yes' > " + ptsname(reader) + " 2>&1 & pid=$!; " + until_up(folder, 2) +
                                "sleep 1; kill -" + signal + " $pid; wait $pid; echo ended with $?"},
                           20);
    close(reader);
    EXPECT_EQ(ended.output, "ended with 130\n") << signal;
    EXPECT_LT(ended.seconds, 10) << signal;
  }
}

// Lines that are too long come in parts, none of which has another rank's text.
TEST(Launch, a_slow_reader_gets_everything) {
  const auto ended = run(
      {"sh", "-c",
       std::string(SHOAL) + " launch -n 2 -- sh -c 'head -c 3000000 /dev/zero | tr \"\\\\000\" $RANK' | (sleep 2; " +
           "awk '/^\\[0\\] 0+$/ {a += length - 4; next} /^\\[1\\] 1+$/ {b += length - 4; next} "
           "{bad++} END {print a, b, bad + 0}')"},
      30);
  EXPECT_EQ(ended.output, "3000000 3000000 0\n");
}

TEST(Launch, output_that_cannot_be_written_is_an_error) {
  const auto ended = run({"sh", "-c", std::string(SHOAL) + " launch -n 2 -- echo hi > /dev/full"}, 20);
  EXPECT_EQ(ended.code, 1);
  EXPECT_EQ(ended.output, "error: cannot write the output of the ranks: No space left on device\n");
}

TEST(Launch, closed_streams_are_not_taken_for_others) {
  const auto ended = run({"sh", "-c", std::string(SHOAL) + " launch -n 2 -- sh -c 'echo hi; exit 3' <&- >&- 2>&-"}, 20);
  EXPECT_EQ(ended.code, 3);
}

TEST(Launch, a_rank_cannot_wait_for_the_terminal) {
  const auto ended =
      run({"script", "-qec",
           std::string(SHOAL) +
               " launch -n 2 -- sh -c 'read x; echo read $?; (read y < /dev/tty) 2>/dev/null; echo tty $?'",
           "/dev/null"},
          20);
  EXPECT_EQ(ended.code, 0) << ended.output;
  for (const auto* line : {"[0] read 1", "[1] read 1", "[0] tty ", "[1] tty "}) {
    EXPECT_TRUE(contains(ended, line)) << ended.output;
  }
  EXPECT_FALSE(contains(ended, "tty 0")) << ended.output;
}

TEST(Launch, ranks_that_write_to_a_terminal_that_stops_background_jobs_go_on) {
  const auto ended =
      run({"script", "-qec",
           std::string("stty tostop; ") + SHOAL + " train --model mlp --size tiny --data reference --steps 2 --ranks 2",
           "/dev/null"},
          60);
  EXPECT_EQ(ended.code, 0) << ended.output;
}

TEST(Launch, a_rank_that_is_stopped_is_named_and_ends_with_the_others) {
  const TempFolder folder;
  const auto about_to_stop = folder.file("about_to_stop");
  const auto ended = run({"sh", "-c",
                          std::string(SHOAL) + " launch -n 2 --stop-grace 1 -- sh -c '[ $RANK = 1 ] && : > " +
                              about_to_stop + " && kill -STOP $$; sleep 60' & pid=$!; until [ -e " + about_to_stop +
                              " ]; do sleep 0.1; done; sleep 1; kill -INT $pid; wait $pid"},
                         30);
  EXPECT_EQ(ended.code, 130) << ended.output;
  EXPECT_TRUE(contains(ended, "shoal: rank 1 (pid ")) << ended.output;
  EXPECT_TRUE(contains(ended, ") was stopped by signal 19 (SIGSTOP); continue it with kill -CONT ")) << ended.output;
}

TEST(Launch, cores_are_shared_out_unless_the_environment_says_otherwise) {
  const auto threads = [](const std::string& ranks, const std::string& variables) {
    const Command command{{SHOAL, "launch", "-n", ranks, "--", "sh", "-c", "echo threads $OMP_NUM_THREADS"},
                          variables_of(variables)};
    return run_together({command}, 20).front().output;
  };
  const auto cores = static_cast<int>(std::thread::hardware_concurrency());
  const auto saved = std::getenv("OMP_NUM_THREADS") != nullptr ? std::string(std::getenv("OMP_NUM_THREADS")) : "";
  unsetenv("OMP_NUM_THREADS");
  EXPECT_EQ(threads("1", ""), "[0] threads " + std::to_string(cores) + "\n");
  EXPECT_EQ(threads(std::to_string(2 * cores), "").find("threads 1\n"), 4U);
  EXPECT_EQ(threads("1", "OMP_NUM_THREADS=7"), "[0] threads 7\n");
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
