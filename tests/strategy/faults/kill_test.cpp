// Ranks that die, stop or never come: every other rank names them without delay, and ends.

#include <gtest/gtest.h>

#include "tests/support/processes.h"
#include "tests/support/warm_program.h"

namespace shoal::test {
namespace {

#ifdef WARM_START
const bool warmed = (warm_up(FAULT_RANK, WARM_START), true);
#endif

// Ranks without a launcher, so that only the ranks themselves can notice.
std::vector<Command> ranks(int size, const std::string& point, int victim) {
  const auto port = std::to_string(free_port());
  std::vector<Command> commands;
  for (int rank = 0; rank < size; ++rank) {
    commands.push_back({{FAULT_RANK, point, std::to_string(victim)},
                        {{"RANK", std::to_string(rank)},
                         {"WORLD_SIZE", std::to_string(size)},
                         {"MASTER_ADDR", "127.0.0.1"},
                         {"MASTER_PORT", port},
                         {"OMP_NUM_THREADS", "1"}}});
  }
  return commands;
}

TEST(Kill, without_a_fault_all_ranks_train_to_the_end) {
  for (const auto& rank : run_together(ranks(3, "none", 0), 60)) EXPECT_EQ(rank.code, 0) << rank.output;
}

void kill_and_look(const std::string& point) {
  for (const int victim : {0, 1, 2}) {
    const auto ended = run_together(ranks(3, point, victim), 60);
    EXPECT_EQ(ended[victim].code, 128 + 9);
    for (int rank = 0; rank < 3; ++rank) {
      if (rank == victim) continue;
      EXPECT_EQ(ended[rank].code, 1) << ended[rank].output;
      EXPECT_NE(ended[rank].output.find("error: rank " + std::to_string(victim) + " "), std::string::npos)
          << "rank " << rank << " said: " << ended[rank].output;
      EXPECT_NE(ended[rank].output.find("step 3"), std::string::npos) << ended[rank].output;
      EXPECT_NE(ended[rank].output.find("bucket"), std::string::npos) << ended[rank].output;
      EXPECT_LT(ended[rank].seconds - ended[victim].seconds, 5);
      EXPECT_FALSE(ended[rank].overdue);
    }
  }
}

TEST(Kill, a_rank_killed_in_forward_is_named_by_the_others) {
  kill_and_look("forward");
}
TEST(Kill, a_rank_killed_in_backward_is_named_by_the_others) {
  kill_and_look("backward");
}
TEST(Kill, a_rank_killed_in_an_all_reduce_is_named_by_the_others) {
  kill_and_look("all_reduce");
}

TEST(Kill, a_stopped_rank_is_named_by_the_others) {
  const auto ended = run_together(ranks(2, "stop", 1), 10);
  EXPECT_TRUE(ended[1].overdue) << "stopped, so the test ended it";
  EXPECT_EQ(ended[0].code, 1);
  EXPECT_NE(ended[0].output.find("error: rank 1 "), std::string::npos) << ended[0].output;
  EXPECT_NE(ended[0].output.find("stopped by a signal"), std::string::npos) << ended[0].output;
}

// The store that it serves does not answer any more, either.
TEST(Kill, a_stopped_rank_that_holds_the_store_is_named_by_the_others) {
  for (const auto* transport : {"host", "tcp", "gloo"}) {
    SCOPED_TRACE(transport);
    auto commands = ranks(3, "stop", 0);
    for (auto& command : commands) command.arguments.emplace_back(transport);
    const auto ended = run_together(commands, 25);
    EXPECT_TRUE(ended[0].overdue) << "stopped, so the test ended it";
    for (const int rank : {1, 2}) {
      EXPECT_EQ(ended[rank].code, 1);
      EXPECT_NE(ended[rank].output.find("error: rank 0 "), std::string::npos) << ended[rank].output;
      EXPECT_NE(ended[rank].output.find("stopped by a signal"), std::string::npos) << ended[rank].output;
      EXPECT_LT(ended[rank].seconds, 20);
    }
  }
}

TEST(Kill, a_late_rank_runs_into_the_deadline) {
  const auto ended = run_together(ranks(2, "late", 1), 50);
  EXPECT_EQ(ended[0].code, 1);
  EXPECT_NE(ended[0].output.find("not finished within the timeout of 10 s"), std::string::npos) << ended[0].output;
  EXPECT_LT(ended[0].seconds, 20);
  EXPECT_EQ(ended[1].code, 1) << "and the late one learns that its peer has gone: " << ended[1].output;
}

TEST(Rendezvous, world_sizes_that_disagree_are_named_on_every_rank) {
  auto commands = ranks(2, "none", 0);
  commands[1].variables[1].second = "3";
  for (const auto& rank : run_together(commands, 30)) {
    EXPECT_EQ(rank.code, 1);
    EXPECT_NE(rank.output.find("world's size differs"), std::string::npos) << rank.output;
    EXPECT_LT(rank.seconds, 10);
  }
}

TEST(Rendezvous, two_processes_of_one_rank_are_named) {
  auto commands = ranks(3, "none", 0);
  commands[2].variables[0].second = "1";
  int named = 0;
  for (const auto& rank : run_together(commands, 40)) {
    EXPECT_EQ(rank.code, 1);
    named += rank.output.find("two processes claim rank 1") != std::string::npos ? 1 : 0;
  }
  EXPECT_EQ(named, 3);
}

TEST(Rendezvous, a_rank_that_never_comes_is_named) {
  auto commands = ranks(3, "none", 0);
  commands.pop_back();
  for (const auto& rank : run_together(commands, 40)) {
    EXPECT_EQ(rank.code, 1);
    EXPECT_NE(rank.output.find("rank(s) 2 of 3 did not appear"), std::string::npos) << rank.output;
    EXPECT_LT(rank.seconds, 15);
  }
}

TEST(Rendezvous, a_port_in_use_is_named) {
  // A foreign listener that never answers: this test's own socket.
  auto commands = ranks(2, "none", 0);
  commands.insert(commands.begin(), {{"python3", "-c",
                                      "import socket,sys,time; s=socket.socket(); "
                                      "s.bind(('127.0.0.1', int(sys.argv[1]))); s.listen(); time.sleep(15)",
                                      commands[0].variables[3].second},
                                     {}});
  commands[1].arguments = {"sh", "-c", "sleep 1; exec " + std::string(FAULT_RANK) + " none 0"};
  commands[2].arguments = commands[1].arguments;
  const auto ended = run_together(commands, 40);
  EXPECT_EQ(ended[1].code, 1);
  EXPECT_NE(ended[1].output.find("is in use; choose another one"), std::string::npos) << ended[1].output;
  EXPECT_EQ(ended[2].code, 1);
  EXPECT_NE(ended[2].output.find("did not answer within"), std::string::npos) << ended[2].output;
  EXPECT_LT(ended[2].seconds, 15);
}

TEST(Rendezvous, rank_without_world_size_is_refused) {
  auto commands = ranks(1, "none", 0);
  commands[0].variables.erase(commands[0].variables.begin() + 1);
  const auto ended = run_together(commands, 10).front();
  EXPECT_EQ(ended.code, 1);
  EXPECT_NE(ended.output.find("RANK is set but WORLD_SIZE is not"), std::string::npos) << ended.output;
}

}  // namespace
}  // namespace shoal::test
