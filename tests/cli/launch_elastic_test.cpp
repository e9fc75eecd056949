// `shoal launch --elastic`: jobs that go on without ranks, and with others.

#include <gtest/gtest.h>

#include <fstream>
#include <string>
#include <vector>

#include "tests/cli/launched.h"
#include "tests/support/processes.h"
#include "tests/support/temp_folder.h"

namespace shoal::test::launch_elastic_test {
namespace {

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

// Nobody has gone on without these: one saved alone when the others had ended, or one ended long before the others
// failed.
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
  const auto begun = (folder.path() / "begun").string();  // rank 0 has opened the program
  std::ofstream(program) << "#!/bin/sh\n[ $RANK = 1 ] && { while [ ! -e " << begun << " ]; do sleep 0.05; done; rm "
                         << program << "; kill -9 $$; }\n: > " << begun << "\nsleep 1\necho rank $RANK is done\n";
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

TEST(Launch, ELA06_a_newcomer_that_cannot_write_its_trace_ends_before_it_joins) {
  const TempFolder folder;
  const auto ended = launch(
      {"-n", "1", "--elastic", "1:2", "--", "sh", "-c",
       "if [ $RANK = 0 ]; then kill -USR2 $PPID; while ! [ -e $0 ]; do sleep 0.2; done; else " + std::string(SHOAL) +
           " train --model mlp --data reference --steps 2 --elastic 1 --trace /proc; touch $0; sleep 50; fi",
       (folder.path() / "ended").string()},
      60);
  EXPECT_EQ(ended.code, 0) << ended.output;
  EXPECT_TRUE(contains(ended, "--trace: cannot write /proc")) << ended.output;
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

}  // namespace
}  // namespace shoal::test::launch_elastic_test
