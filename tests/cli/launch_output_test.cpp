// `shoal launch`: what ranks print arrives, whatever reads it, and terminals.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <string>

#include "tests/cli/launched.h"
#include "tests/support/processes.h"
#include "tests/support/temp_folder.h"

namespace shoal::test::launch_output_test {
namespace {

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

}  // namespace
}  // namespace shoal::test::launch_output_test
