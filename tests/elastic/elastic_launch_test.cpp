// A user's program under `shoal launch --elastic`, whose ranks are killed and come again.

#include <gtest/gtest.h>

#include <set>
#include <string>

#include "tests/support/processes.h"
#include "tests/support/temp_folder.h"

namespace shoal::elastic_launch_test {
namespace {

// Runs `meanwhile`, lines of a shell in which $pid is the launcher and ranks_of_it lists its ranks, beside the launcher, from
// the first epoch's end on.
test::Ended launch_program(const std::string& epochs, const test::TempFolder& folder, const std::string& meanwhile) {
  const auto output = folder.file("output");
  // Without the file of a run before, in which an epoch has ended already.
  const std::string script = "rm -f " + output + "; " + SHOAL + " launch -n 3 --elastic 1:5 --max-restarts 9 -- " +
                             JOIN_PROGRAM + " " + epochs + " " + folder.file("metrics.jsonl") + " > " + output +
                             " 2>&1 & pid=$!; ranks_of_it() { for child in $(cat /proc/$pid/task/$pid/children); do "
                             "grep -q join_program /proc/$child/comm && echo $child; done; }; "
                             "until grep -q 'epoch 0 on' " +
                             output + " || ! kill -0 $pid; do sleep 0.02; done; " + meanwhile +
                             " wait $pid; echo code $?; cat " + output;
  return test::run({"sh", "-c", script}, 120);
}

std::set<std::string> norms_in(const std::string& output) {
  std::set<std::string> norms;
  for (auto at = output.find("norm "); at != std::string::npos; at = output.find("norm ", at + 1)) {
    norms.insert(output.substr(at, output.find('\n', at) - at));
  }
  return norms;
}

// As a user does it: kill -9 and SIGUSR2 while a program trains.
TEST(ElasticJoin, ELA06_a_program_under_the_launcher_ends_with_the_parameters_of_a_run_without_changes) {
  const test::TempFolder folder;
  const auto plain = launch_program("150", folder, "");
  const auto changed = launch_program("150", folder,
                                      "for i in 2 1 3; do sleep 1; kill -9 $(ranks_of_it | sed -n ${i}p); sleep 0.6; "
                                      "kill -USR2 $pid; done; kill -0 $pid || echo too early;");
  for (const auto* ended : {&plain, &changed}) {
    EXPECT_NE(ended->output.find("code 0"), std::string::npos) << ended->output;
    EXPECT_EQ(norms_in(ended->output).size(), 1U) << ended->output;
  }
  EXPECT_EQ(norms_in(plain.output), norms_in(changed.output)) << "number of steps or parameters differ";
  EXPECT_NE(changed.output.find("is started to join the job (in place of rank"), std::string::npos) << changed.output;
  EXPECT_NE(changed.output.find("joined (number"), std::string::npos) << changed.output;
}

}  // namespace
}  // namespace shoal::elastic_launch_test
