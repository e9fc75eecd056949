// `shoal launch`: how jobs whose ranks or launcher are killed end, with no process left behind.

#include <gtest/gtest.h>

#include <csignal>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "tests/cli/launched.h"
#include "tests/support/processes.h"
#include "tests/support/temp_folder.h"

namespace shoal::test::launch_ends_test {
namespace {

// Zombies that are not reaped yet count as dead.
bool lives(int pid) {
  std::ifstream stat("/proc/" + std::to_string(pid) + "/stat");
  std::string number, name, state;
  return stat >> number >> name >> state && state != "Z";
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
         std::string(SHOAL) + " launch -n 2 --stop-grace 1 -- " + starts_others(pids) + " & pid=$!; until [ \"$(cat " +
             pids + " | wc -l)\" = 6 ]; do sleep 0.05; done; kill -" + signal + " $pid; sleep 2"},
        30);
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

// The first process of a container becomes the parent of all whose own have ended. It stays so once its watcher is
// killed, which is a zombie before them. The other rank may be one for a moment.
TEST(Launch, as_the_first_process_of_a_container_it_leaves_no_zombies) {
  const std::vector<std::string> container{"unshare", "--pid", "--fork", "--mount-proc", "--kill-child"};
  const auto in_container = [&](std::vector<std::string> command) {
    command.insert(command.begin(), container.begin(), container.end());
    return run(command, 60);
  };
  if (in_container({"true"}).code != 0) GTEST_SKIP() << "no namespaces of processes";
  const std::string orphans = "for i in 1 2 3; do (sleep 0.1 &); done; sleep 1; ";
  const std::string zombies = "$(cat /proc/[0-9]*/stat 2>/dev/null | grep -cE '(sleep|shoal-watcher)\\) Z 1 ')";
  const std::string kill_watcher =
      "for child in $(cat /proc/1/task/1/children); do "
      "grep -q shoal-watcher /proc/$child/comm && kill -9 $child && echo killed; done; ";
  const auto ended = in_container({SHOAL, "launch", "-n", "2", "--", "sh", "-c",
                                   orphans + "echo zombies: " + zombies + "; [ $RANK = 1 ] || { " + kill_watcher +
                                       orphans + "echo without watcher: " + zombies + "; }"});
  EXPECT_EQ(ended.code, 0) << ended.output;
  EXPECT_TRUE(contains(ended, "[0] zombies: 0")) << ended.output;
  EXPECT_TRUE(contains(ended, "[1] zombies: 0")) << ended.output;
  EXPECT_TRUE(contains(ended, "[0] killed")) << ended.output;
  EXPECT_TRUE(contains(ended, "[0] without watcher: 0")) << ended.output;
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

}  // namespace
}  // namespace shoal::test::launch_ends_test
