// `shoal launch --elastic`: how a job that is lost ends, and what the launcher says of it.

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/support/processes.h"
#include "tests/support/temp_folder.h"

namespace shoal::test::elastic_launch_test {
namespace {

bool contains(const Ended& ended, const std::string& text) {
  return ended.output.find(text) != std::string::npos;
}

// Three ranks train without an end. Once the first one has written metrics, the shell runs `then`, with the launcher in
// $pid, the ranks in $ranks and the output in $out.
Ended disturbed(const std::string& launch, const std::string& train, const std::string& then) {
  const TempFolder folder;
  const auto metrics = folder.file("metrics.jsonl");
  const std::string shoal = SHOAL;
  const auto script = "out=" + folder.file("output") + "; cd " + folder.path().string() + "; " + shoal + " " + launch +
                      (launch.empty() ? "" : " -- " + shoal + " ") +
                      "train --model mlp --data reference --steps 1000000 --threads 1 " + train + " --metrics " +
                      metrics + " > $out 2>&1 & pid=$!; until [ -s " + metrics +
                      " ] || ! kill -0 $pid; do sleep 0.05; done; ranks=$(for child in $(cat "
                      "/proc/$pid/task/*/children); do grep -qE '^shoal(-rank.*)?$' /proc/$child/comm && echo $child; "
                      "done); first=$(echo $ranks | cut -d ' ' -f 1); " +
                      then + " wait $pid; code=$?; cat $out; exit $code";
  return run({"sh", "-c", script}, 60);
}

// The others wait for it 3 s in the step, and 3 s in the recovery.
Ended stop_a_rank(const std::string& grace, const std::string& then) {
  return disturbed("launch -n 3 --elastic 1 --grace " + grace, "--elastic 1 --timeout 3", "kill -STOP $first; " + then);
}

TEST(ElasticLaunch, ELA10_a_job_that_is_given_up_ends_with_the_rank_that_is_stopped) {
  const auto ended = stop_a_rank("1", "");
  EXPECT_FALSE(ended.overdue) << ended.output;
  EXPECT_NE(ended.code, 0);
  EXPECT_TRUE(contains(ended, "shoal: the job is lost: rank(s) 0 (pid ")) << ended.output;
}

TEST(ElasticLaunch, ELA10_a_rank_that_is_continued_does_not_go_on_with_a_job_that_was_given_up) {
  const auto ended = stop_a_rank(
      "30", "until grep -q 'the job is lost' $out || ! kill -0 $pid; do sleep 0.05; done; kill -CONT $first;");
  EXPECT_FALSE(ended.overdue) << ended.output;
  EXPECT_NE(ended.code, 0);
  EXPECT_TRUE(contains(ended, "has waited in vain for others, and has given the job up")) << ended.output;
  EXPECT_FALSE(contains(ended, "go on after")) << ended.output;
  EXPECT_FALSE(contains(ended, "goes on after")) << ended.output;
}

// The program itself would go on with one rank.
TEST(ElasticLaunch, ELA10_fewer_ranks_than_the_launcher_wants_are_left) {
  const auto ended = disturbed("launch -n 3 --elastic 2", "--elastic 1 --save run --save-every 1",
                               "until [ -e run/latest ]; do sleep 0.05; done; kill -9 ${ranks#$first};");
  EXPECT_EQ(ended.code, 128 + 9) << ended.output;
  EXPECT_TRUE(contains(ended, "shoal: 1 rank is left, and --elastic wants 2: the job ends")) << ended.output;
  EXPECT_TRUE(contains(ended, "1 of 3 ranks are left, and this elastic job needs min_ranks = 2")) << ended.output;
  EXPECT_TRUE(contains(ended, "(the last checkpoint is run/step-")) << ended.output;
}

TEST(ElasticLaunch, ELA10_all_ranks_are_killed_and_the_launcher_names_the_last_checkpoint) {
  const auto ended = disturbed("", "--strategy zero2 --ranks 2 --elastic 1 --save run --save-every 1",
                               "until [ -e run/latest ]; do sleep 0.05; done; kill -9 $ranks;");
  EXPECT_EQ(ended.code, 128 + 9) << ended.output;
  EXPECT_TRUE(contains(
      ended,
      "shoal: no rank is left, so the job and all shards of its state are lost (the last checkpoint is run/step-"))
      << ended.output;
  EXPECT_TRUE(contains(ended, "; the same command with --resume latest goes on from it")) << ended.output;
}

TEST(ElasticLaunch, ELA10_the_only_rank_of_a_job_that_may_grow_is_killed) {
  const auto ended =
      run({SHOAL, "launch", "-n", "1", "--elastic", "1:2", "--max-restarts", "2", "--", "sh", "-c", "kill -9 $$"}, 30);
  EXPECT_EQ(ended.code, 128 + 9) << ended.output;
  EXPECT_TRUE(contains(ended, "shoal: no rank is left, so the job and all shards of its state are lost\n"))
      << ended.output;
}

}  // namespace
}  // namespace shoal::test::elastic_launch_test
