// `shoal launch`: any program, N ranks, nobody left behind.

#include <gtest/gtest.h>

#include <fstream>

#include "tests/support/processes.h"
#include "tests/support/temp_folder.h"

namespace shoal::test {
namespace {

Ended launch(std::vector<std::string> arguments, double limit = 60) {
  arguments.insert(arguments.begin(), {SHOAL, "launch"});
  return run(arguments, limit);
}

bool contains(const Ended& ended, const std::string& text) {
  return ended.output.find(text) != std::string::npos;
}

// Zombies that nobody has reaped yet are dead.
bool lives(int pid) {
  std::ifstream stat("/proc/" + std::to_string(pid) + "/stat");
  std::string number, name, state;
  return stat >> number >> name >> state && state != "Z";
}

TEST(Launch, GivesEachRankTorchrunsVariablesAndPrefixesItsLines) {
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

TEST(Launch, TheFirstFailureStopsAllAndItsExitCodeIsKept) {
  const auto ended = launch({"-n", "3", "--grace", "0.5", "--", "sh", "-c", "[ $RANK = 1 ] && exit 7; sleep 50"});
  EXPECT_EQ(ended.code, 7);
  EXPECT_TRUE(contains(ended, "rank 1 ended with exit code 7")) << ended.output;
  EXPECT_LT(ended.seconds, 6);
}

TEST(Launch, ASignalIsNamed) {
  const auto ended = launch({"-n", "2", "--grace", "0.5", "--", "sh", "-c", "[ $RANK = 0 ] && kill -9 $$; sleep 50"});
  EXPECT_EQ(ended.code, 128 + 9);
  EXPECT_TRUE(contains(ended, "rank 0 was killed by signal 9 (SIGKILL)")) << ended.output;
}

TEST(Launch, ARankKilledInTrainingIsNamedByTheOthersAndByTheLauncher) {
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

TEST(Launch, RanksThatIgnoreSigtermAreKilled) {
  const auto ended = launch({"-n", "2", "--grace", "0.2", "--", "sh", "-c",
                             "trap '' TERM; [ $RANK = 0 ] && exit 3; sleep 50 & wait; wait; sleep 50"});
  EXPECT_EQ(ended.code, 3);
  EXPECT_LT(ended.seconds, 10);
}

// Ranks that go on after SIGINT, and the shell that sends `signals` to the launcher.
Ended launch_and_signal(const std::string& options, const std::string& signals) {
  return run({"sh", "-c",
              std::string(SHOAL) + " launch -n 2 " + options +
                  " -- sh -c 'trap \"echo asked\" INT; echo ready; while :; do sleep 0.1; done' & pid=$!; sleep 1; " +
                  signals + "; wait $pid"},
             30);
}

TEST(Launch, RanksThatGoOnAfterAnInterruptAreKilledAfterTheStopGrace) {
  const auto ended = launch_and_signal("--stop-grace 0.5", "kill -INT $pid");
  EXPECT_EQ(ended.code, 130) << ended.output;
  EXPECT_TRUE(contains(ended, "asked")) << ended.output;
  EXPECT_LT(ended.seconds, 10);
}

TEST(Launch, ASecondInterruptKillsAtOnce) {
  const auto ended = launch_and_signal("", "kill -TERM $pid; sleep 1; kill -TERM $pid");
  EXPECT_EQ(ended.code, 130) << ended.output;
  EXPECT_TRUE(contains(ended, "asked")) << ended.output;
  EXPECT_LT(ended.seconds, 10);
}

TEST(Launch, AProgramThatDoesNotExistIsNamed) {
  const auto ended = launch({"-n", "2", "--", "no-such-program"});
  EXPECT_EQ(ended.code, 1);
  EXPECT_TRUE(contains(ended, "error: cannot start 'no-such-program': No such file or directory")) << ended.output;
}

TEST(Launch, APortInUseIsNamedBeforeAnyRankStarts) {
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

TEST(Launch, NoRankOutlivesALauncherThatIsKilled) {
  const TempFolder folder;
  const auto pids = folder.file("pids");
  const auto ended = run({"sh", "-c",
                          std::string(SHOAL) + " launch -n 2 -- sh -c 'echo $$ >> " + pids + "; exec sleep 50' & " +
                              "sleep 1; kill -9 $!; sleep 1"},
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

TEST(Launch, SigintReachesTheRanksAndEndsWith130) {
  const auto ended = run({"sh", "-c",
                          std::string(SHOAL) + " launch -n 2 -- sh -c 'trap \"echo stopped; exit 0\" INT; " +
                              "while true; do sleep 0.1; done' & pid=$!; sleep 1; kill -INT $pid; wait $pid"},
                         20);
  EXPECT_EQ(ended.code, 130);
  EXPECT_TRUE(contains(ended, "[0] stopped") && contains(ended, "[1] stopped")) << ended.output;
}

TEST(Launch, PythonsTorchDistributedMeetsInOurStore) {
  if (run({PYTHON, "-c", "import torch"}, 60).code != 0) GTEST_SKIP() << "the virtual environment cannot import torch";
  const auto ended = launch({"-n", "2", "--", PYTHON, "-c",
                             "import torch, torch.distributed as d\n"
                             "d.init_process_group('gloo'); t = torch.ones(1) * d.get_rank(); d.all_reduce(t)\n"
                             "print('sum', t.item()); d.destroy_process_group()"});
  EXPECT_EQ(ended.code, 0) << ended.output;
  EXPECT_TRUE(contains(ended, "[1] sum 1.0")) << ended.output;
}

// Nobody waits in vain: the launcher says at the end, or when asked meanwhile, who is waited for.
TEST(Launch, FlightRecordersNameTheRankThatIsWaitedFor) {
  const TempFolder folder;
  const auto ended = launch({"-n", "3", "--flight-recorder", folder.path(), "--", FAULT_RANK, "forward", "2"});
  EXPECT_EQ(ended.code, 128 + 9);
  EXPECT_TRUE(contains(ended, "shoal: rank 2 never entered #")) << ended.output;
  const auto told = run({SHOAL, "flight", folder.path(), "--last", "2"}, 20);
  EXPECT_EQ(told.code, 0);
  EXPECT_TRUE(contains(told, "rank 2 never entered #")) << told.output;
  EXPECT_TRUE(contains(told, "rank 0 of 3, pid ")) << told.output;
}

TEST(Launch, Sigusr1AsksTheFlightRecordersOfRunningRanks) {
  const TempFolder folder;
  const auto program =
      std::string(SHOAL) + " launch -n 2 --flight-recorder " + folder.path().string() + " -- " + FAULT_RANK;
  const auto ended = run({"sh", "-c", program + " late 1 auto 12 & pid=$!; sleep 8; kill -USR1 $pid; wait $pid"}, 60);
  EXPECT_TRUE(contains(ended, "shoal: rank 1 has not entered #")) << ended.output;
  EXPECT_TRUE(contains(ended, ") runs; ")) << ended.output;
}

}  // namespace
}  // namespace shoal::test
