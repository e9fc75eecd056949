// `shoal launch` on several nodes, which are one job.

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/cli/launched.h"
#include "tests/support/processes.h"
#include "tests/support/temp_folder.h"

namespace shoal::test::launch_nodes_test {
namespace {

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
        std::string(SHOAL) + " train --model mlp --data reference --steps 2000 --elastic 1 --metrics " + metrics;
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

}  // namespace
}  // namespace shoal::test::launch_nodes_test
