// How the ranks of `shoal launch` end, or stand still, when a job is told to from outside: signals, a terminal, a
// reader that ends.

#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "tests/cli/launched.h"

namespace shoal::test::launch_stop_test {
namespace {

// Launches ranks that ignore SIGINT, and a shell that sends `signals` to the launcher once they run: a shell's
// background process ignores SIGINT until it asks for it.
Ended launch_and_signal(const std::string& options, const std::string& signals) {
  const TempFolder folder;
  const auto log = folder.file("log");
  return run({"sh", "-c",
              std::string(SHOAL) + " launch -n 2 " + options +
                  " -- sh -c 'trap \"echo asked\" INT; echo ready; while :; do sleep 0.1; done' > " + log +
                  " 2>&1 & pid=$!; until [ $(grep -c ready " + log + ") = 2 ]; do sleep 0.1; done; " + signals +
                  "; wait $pid; code=$?; cat " + log + "; exit $code"},
             30);
}

TEST(Launch, ranks_that_go_on_after_an_interrupt_are_killed_after_the_stop_grace) {
  const auto ended = launch_and_signal("--stop-grace 0.5", "kill -INT $pid");
  EXPECT_EQ(ended.code, 128 + 15) << ended.output;
  EXPECT_TRUE(contains(ended, "asked")) << ended.output;
  EXPECT_TRUE(contains(ended, "shoal: 0.5 s after they were told to stop, these ranks are killed: 0, 1\n"))
      << ended.output;
  EXPECT_LT(ended.seconds, 10);
}

TEST(Launch, a_second_interrupt_kills_at_once) {
  const auto ended = launch_and_signal("", "kill -TERM $pid; sleep 1.2; kill -TERM $pid");
  EXPECT_EQ(ended.code, 128 + 9) << ended.output;
  EXPECT_TRUE(contains(ended, "asked")) << ended.output;
  EXPECT_TRUE(contains(ended, "shoal: told to stop once more: the ranks are killed\n")) << ended.output;
  EXPECT_LT(ended.seconds, 10);
}

TEST(Launch, a_hangup_lets_the_ranks_save) {
  const auto ended = launch_and_signal("--stop-grace 0.5", "kill -HUP $pid");
  EXPECT_EQ(ended.code, 128 + 15) << ended.output;
  EXPECT_TRUE(contains(ended, "asked")) << ended.output;
}

// Of a rank: after SIGINT it takes half a second to save, and says so.
std::string saves(const TempFolder& folder, const std::string& code = "130") {
  return "sh -c 'trap \"echo saving; sleep 0.5; echo > " + folder.file("saved") + "$RANK; exit " + code +
         "\" INT; touch " + folder.file("up") + "$RANK; while :; do sleep 0.05; done'";
}

bool have_saved(const TempFolder& folder) {
  return std::filesystem::exists(folder.file("saved0")) && std::filesystem::exists(folder.file("saved1"));
}

// `timeout` signals a program and the program's group, and a shell that is hung up passes on what the kernel sends,
// too.
TEST(Launch, signals_that_come_together_are_one_request_and_a_hangup_is_no_second_one) {
  const TempFolder folder;
  const auto ended =
      run({"sh", "-c",
           std::string(SHOAL) + " launch -n 2 -- " + saves(folder) + " & pid=$!; " + until_up(folder, 2) +
               "kill -TERM $pid; kill -INT $pid; kill -HUP $pid; sleep 0.1; kill -TERM $pid; wait $pid"},
          20);
  EXPECT_EQ(ended.code, 130) << ended.output;
  EXPECT_TRUE(have_saved(folder)) << ended.output;
}

TEST(Launch, a_rank_that_could_not_save_after_an_interrupt_is_named_and_its_exit_code_kept) {
  const TempFolder folder;
  const auto ended = run({"sh", "-c",
                          std::string(SHOAL) + " launch -n 2 -- " + saves(folder, "$((RANK * 7))") + " & pid=$!; " +
                              until_up(folder, 2) + "kill -INT $pid; wait $pid"},
                         20);
  EXPECT_EQ(ended.code, 7) << ended.output;
  EXPECT_TRUE(contains(ended, "), told to stop, ended with exit code 7\n")) << ended.output;
  EXPECT_TRUE(contains(ended, "shoal: rank 1 (pid ")) << ended.output;
  EXPECT_TRUE(contains(ended, "[0] saving\n") && contains(ended, "[1] saving\n")) << ended.output;
}

// As `2>&1 | tee log` does with Ctrl-C, which ends both.
TEST(Launch, ranks_save_though_the_reader_of_their_output_has_ended) {
  const TempFolder folder;
  const auto pipe = folder.file("pipe");
  const auto ended =
      run({"sh", "-c",
           "mkfifo " + pipe + "; sleep 30 < " + pipe + " & reader=$!; " + SHOAL + " launch -n 2 -- " + saves(folder) +
               " > " + pipe + " 2>&1 & pid=$!; " + until_up(folder, 2) + "kill $reader; kill -INT $pid; wait $pid"},
          20);
  EXPECT_EQ(ended.code, 130) << ended.output;
  EXPECT_TRUE(have_saved(folder)) << ended.output;
}

TEST(Launch, ranks_whose_output_nobody_reads_any_more_are_told_to_stop) {
  const TempFolder folder;
  const auto ended =
      run({"sh", "-c",
           "{ " + std::string(SHOAL) + " launch -n 1 -- sh -c 'trap \"echo > " + folder.file("saved") +
               "; exit 0\" INT; while :; do echo line; sleep 0.05; done'; echo code $? >&2; } | head -n 1"},
          20);
  EXPECT_TRUE(contains(ended, "shoal: nobody reads the output any more: the ranks are told to stop\n")) << ended.output;
  EXPECT_TRUE(contains(ended, "error: cannot write the output of the ranks: Broken pipe\ncode 1\n")) << ended.output;
  EXPECT_TRUE(std::filesystem::exists(folder.file("saved")));
}

// As a shell with job control: it starts the launcher in a process group of its own, without which the system stops
// nothing.
constexpr const char* suspend = R"(
import os, signal, subprocess, sys, time
shoal, folder = sys.argv[1:]
os.mkfifo(folder + "/pipe")
pipe = os.open(folder + "/pipe", os.O_RDWR)
rank = "echo $$ > up$RANK; read line < pipe; echo over"
job = subprocess.Popen([shoal, "launch", "-n", "2", "--", "sh", "-c", rank], cwd=folder, preexec_fn=os.setpgrp)
def wait_for(condition):
    end = time.time() + 10
    while not condition() and time.time() < end:
        time.sleep(0.02)
def text(path):
    return open(path).read() if os.path.exists(path) else ""
ups = [folder + "/up0", folder + "/up1"]
wait_for(lambda: all(text(up).endswith("\n") for up in ups))
pids = [job.pid] + [int(text(up)) for up in ups]
states = lambda: [text(f"/proc/{pid}/stat").split()[2] for pid in pids]
os.kill(job.pid, signal.SIGTSTP)
wait_for(lambda: states() == ["T"] * 3)
print(*states(), flush=True)
os.kill(job.pid, signal.SIGCONT)
os.write(pipe, b"\n\n")
sys.exit(job.wait())
)";

TEST(Launch, ctrl_z_stops_the_ranks_until_the_launcher_is_continued) {
  const TempFolder folder;
  const auto ended = run({"python3", "-c", suspend, SHOAL, folder.path().string()}, 40);
  EXPECT_EQ(ended.code, 0) << ended.output;
  EXPECT_TRUE(contains(ended, "T T T\n")) << ended.output;
  EXPECT_TRUE(contains(ended, "[0] over\n") && contains(ended, "[1] over\n")) << ended.output;
  EXPECT_FALSE(contains(ended, "was stopped by")) << ended.output;
}

TEST(Launch, nohup_is_respected) {
  const TempFolder folder;
  const auto ended = run({"sh", "-c",
                          "trap '' HUP; " + std::string(SHOAL) + " launch -n 1 -- sh -c 'touch " + folder.file("up") +
                              "; sleep 1; echo over' & pid=$!; " + until_up(folder, 1) + "kill -HUP $pid; wait $pid"},
                         20);
  EXPECT_EQ(ended.code, 0) << ended.output;
  EXPECT_TRUE(contains(ended, "over")) << ended.output;
}

TEST(Launch, a_stop_grace_may_be_longer_than_a_clock_can_say) {
  const TempFolder folder;
  for (const std::string grace : {"1e12", "inf"}) {
    const auto ready = folder.file(grace);
    const auto ended = run({"sh", "-c",
                            std::string(SHOAL) + " launch -n 1 --stop-grace " + grace +
                                " -- sh -c 'trap \"sleep 1; echo saved; exit 0\" INT; echo > " + ready +
                                "; while :; do sleep 0.1; done' & pid=$!; until [ -e " + ready +
                                " ]; do sleep 0.05; done; kill -INT $pid; wait $pid"},
                           20);
    EXPECT_EQ(ended.code, 130) << ended.output;
    EXPECT_TRUE(contains(ended, "saved")) << grace << ": " << ended.output;
  }
}

TEST(Launch, a_rank_may_save_for_as_long_as_the_stop_grace_when_the_others_have_ended) {
  const TempFolder folder;
  const auto ready = folder.file("ready");
  const auto ended =
      run({"sh", "-c",
           std::string(SHOAL) + " launch -n 2 --grace 0.3 --stop-grace inf -- sh -c '" +
               "[ $RANK = 1 ] && trap \"exit 130\" INT || trap \"sleep 2; echo saved; exit 130\" INT; echo > " + ready +
               "$RANK; while :; do sleep 0.1; done' & pid=$!; until [ -e " + ready + "0 ] && [ -e " + ready +
               "1 ]; do sleep 0.05; done; kill -INT $pid; wait $pid"},
          20);
  EXPECT_EQ(ended.code, 130) << ended.output;
  EXPECT_TRUE(contains(ended, "saved")) << ended.output;
}

TEST(Launch, an_interrupt_does_not_prolong_a_job_that_has_failed) {
  const TempFolder folder;
  const auto log = folder.file("log");
  const auto ended =
      run({"sh", "-c",
           std::string(SHOAL) +
               " launch -n 2 --grace 2 --stop-grace 60 -- sh -c 'trap \"\" INT; [ $RANK = 0 ] && exit 3; " +
               "sleep 50' > " + log + " 2>&1 & pid=$!; until grep -q \"exit code 3\" " + log +
               "; do sleep 0.05; done; kill -INT $pid; wait $pid"},
          30);
  EXPECT_EQ(ended.code, 3) << ended.output;
  EXPECT_LT(ended.seconds, 15);
}

}  // namespace
}  // namespace shoal::test::launch_stop_test
