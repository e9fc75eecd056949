// A user's program under `shoal launch --elastic`, whose ranks are killed and come again.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "tests/support/processes.h"
#include "tests/support/temp_folder.h"

namespace shoal::elastic_launch_test {
namespace {

// Runs `meanwhile`, lines of a shell in which $pid is the launcher and ranks_of_it lists its ranks, beside the
// launcher, from the first epoch's end on.
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
  const auto plain = launch_program("200", folder, "");
  const auto changed = launch_program("200", folder,
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

// Two launchers as of two hosts, and a third one that comes; a rank of each of the last two is killed and replaced.
TEST(ElasticJoin, ELA06_launchers_of_several_hosts_and_one_that_comes) {
  const test::TempFolder folder;
  const int port = test::free_port();
  const auto launcher = [&](const std::string& place, const std::string& name) {
    const auto command = fmt::format("{} launch {} -n 2 --max-restarts 3 --port {} -- {} 150 {}.jsonl", SHOAL, place,
                                     port, JOIN_PROGRAM, folder.file(name));
    return fmt::format("({0} > {1} 2>&1; echo code $? >> {1}) & ", command, folder.file(name));
  };
  const auto kill_one = [&](const std::string& name) {
    return fmt::format(
        "for i in $(seq 600); do pgrep -f '^{0} 150 {1}.jsonl' > /dev/null && break; sleep 0.05; done; sleep 1; "
        "kill -9 $(pgrep -f '^{0} 150 {1}.jsonl' | head -1); ",
        JOIN_PROGRAM, folder.file(name));
  };
  const auto script =
      "export SHOAL_SECRET=0123456789abcdef0123456789abcdef; " +
      launcher("--nnodes 2 --node-rank 0 --elastic 1:6", "first") +
      launcher("--nnodes 2 --node-rank 1 --elastic 1:6", "second") +
      fmt::format("for i in $(seq 600); do grep -q 'epoch 0 on' {} && break; sleep 0.05; done; ",
                  folder.file("first")) +
      launcher("--join", "third") + kill_one("second") + kill_one("third") +
      fmt::format("wait; cat {} {} {}", folder.file("first"), folder.file("second"), folder.file("third"));
  const auto output = test::run({"sh", "-c", script}, 120).output;
  EXPECT_EQ(norms_in(output).size(), 1U) << output;
  size_t good = 0;
  for (auto at = output.find("code 0"); at != std::string::npos; at = output.find("code 0", at + 1)) ++good;
  EXPECT_EQ(good, 3U) << output;
  for (const auto* text : {"(its host comes to the job)", "in place of rank", "on 6 rank(s)", "has joined (number 7"}) {
    EXPECT_NE(output.find(text), std::string::npos) << text << "\n" << output;
  }
}

// Fewer ranks of the first ones are left than the least, but others have come. A host with a program that fails, and
// one with a program that does not train, neither disturb the job nor outlive it.
TEST(ElasticJoin, ELA06_ranks_that_have_come_count_and_hosts_that_do_not_join_end_with_the_job) {
  const test::TempFolder folder;
  const int port = test::free_port();
  const auto launcher = [&](const std::string& place, const std::string& program, const std::string& name) {
    return fmt::format("({0} launch {1} --port {2} -- {3} > {4} 2>&1; echo {5} code $? >> {4}) & ", SHOAL, place, port,
                       program, folder.file(name), name);
  };
  const auto trains = [&](const std::string& name) {
    return fmt::format("{} 300 {}.jsonl", JOIN_PROGRAM, folder.file(name));
  };
  const auto await = [&](const std::string& text) {
    return fmt::format("for i in $(seq 600); do grep -q '{}' {} && break; sleep 0.05; done; ", text,
                       folder.file("first"));
  };
  const auto script = "export SHOAL_SECRET=0123456789abcdef0123456789abcdef; " +
                      launcher("--nnodes 2 --node-rank 0 -n 1 --elastic 2:6", trains("first"), "first") +
                      launcher("--nnodes 2 --node-rank 1 -n 1 --elastic 2:6", trains("second"), "second") +
                      await("epoch 0 on") + launcher("--join -n 2", trains("third"), "third") + await("on 4 rank") +
                      launcher("--join -n 1", "false", "fails") + launcher("--join -n 1", "sleep 1000", "sleeps") +
                      fmt::format("sleep 1; kill -9 $(pgrep -f '^{}' | head -1); ", trains("second")) + "wait; cat " +
                      folder.path().string() + "/first " + folder.path().string() + "/second " +
                      folder.path().string() + "/third " + folder.path().string() + "/fails " + folder.path().string() +
                      "/sleeps";
  const auto output = test::run({"sh", "-c", script}, 120).output;
  EXPECT_EQ(norms_in(output).size(), 1U) << output;
  for (const auto* text : {"first code 0", "second code 137", "third code 0", "fails code 1", "sleeps code 1",
                           "on 3 rank(s)", "was to join a job that has ended"}) {
    EXPECT_NE(output.find(text), std::string::npos) << text << "\n" << output;
  }
}

TEST(ElasticJoin, ELA06_a_host_that_comes_to_no_such_job_is_told_why) {
  const test::TempFolder folder;
  const int port = test::free_port();
  const auto ranks = fmt::format(" launch --nnodes 2 -n 1 --elastic 1 --port {} --node-rank ", port);
  const auto joins = fmt::format("{} launch --join -n 1 --port {} -- true; echo code $?; ", SHOAL, port);
  const std::string secret = "SHOAL_SECRET=0123456789abcdef0123456789abcdef ";
  const auto script = secret + SHOAL + ranks + "0 -- sleep 8 > /dev/null 2>&1 & " + secret + SHOAL + ranks +
                      "1 -- sleep 8 > /dev/null 2>&1 & " + secret + joins + joins + "wait";
  const auto output = test::run({"sh", "-c", script}, 60).output;
  EXPECT_NE(output.find("takes in no hosts: start it with --nnodes"), std::string::npos) << output;
  EXPECT_NE(output.find("has a secret: set its SHOAL_SECRET"), std::string::npos) << output;
}

}  // namespace
}  // namespace shoal::elastic_launch_test
