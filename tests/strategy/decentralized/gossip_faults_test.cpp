// Decentralised training when a rank dies, is late, is slow or has fewer batches (row DEC17, BEY03): the others go on.

#include <gtest/gtest.h>

#include <tuple>

#include "tests/support/processes.h"
#include "tests/support/warm_program.h"

namespace shoal::test {
namespace {

#ifdef WARM_START
const bool warmed = (warm_up(GOSSIP_RANK, WARM_START), true);
#endif

// then: what a new process does in the victim's place once the victim has ended.
std::vector<Ended> train(const std::string& fault, int victim, const std::string& topology,
                         const std::string& transport, const std::string& then = "", int size = 4) {
  const auto port = std::to_string(free_port());
  std::vector<Command> commands;
  for (int rank = 0; rank < size; ++rank) {
    std::vector<std::string> command{GOSSIP_RANK, fault, std::to_string(victim), topology, transport};
    if (rank == victim && !then.empty()) {
      const auto line = [&](const std::string& as) {
        return std::string(GOSSIP_RANK) + " " + as + " " + std::to_string(victim) + " " + topology + " " + transport;
      };
      command = {"sh", "-c", line(fault) + "; exec " + line(then)};
    }
    commands.push_back({std::move(command),
                        {{"RANK", std::to_string(rank)},
                         {"WORLD_SIZE", std::to_string(size)},
                         {"MASTER_ADDR", "127.0.0.1"},
                         {"MASTER_PORT", port},
                         {"OMP_NUM_THREADS", "1"}}});
  }
  if (fault == "none") {  // one more process, which wants the victim's place too early
    commands.push_back(commands[victim]);
    commands.back().arguments[1] = "still_there";
  }
  return run_together(commands, 90);
}

std::string text_of(const Ended& rank, const std::string& key) {
  const auto at = rank.output.find(key + "=");
  if (at == std::string::npos) return "?";
  const auto begin = at + key.size() + 1;
  return rank.output.substr(begin, rank.output.find_first_of(" \n", begin) - begin);
}
double number(const Ended& rank, const std::string& key) {
  const auto text = text_of(rank, key);
  return text.empty() || text == "?" ? -1 : std::stod(text);
}

// Loss that ranks reach without a fault; untrained it is above 0.45.
constexpr double trained_loss = 0.3;

class GossipFaults : public testing::TestWithParam<std::string> {};

TEST_P(GossipFaults, DEC17_without_a_fault_nothing_is_skipped_and_ranks_agree) {
  auto ended = train("none", 1, "ring", GetParam());
  EXPECT_NE(ended.back().output.find("error: rejoin: "), std::string::npos) << ended.back().output;
  ended.pop_back();
  for (const auto& rank : ended) {
    ASSERT_EQ(rank.code, 0) << rank.output;
    EXPECT_EQ(number(rank, "skipped"), 0) << rank.output;
    EXPECT_LT(number(rank, "loss"), trained_loss);
    EXPECT_EQ(text_of(rank, "mean"), text_of(ended[0], "mean"));
  }
}

// Each pair of a topology, a moment and a victim: rank 0 has the store.
TEST_P(GossipFaults, DEC17_the_others_finish_without_a_rank_that_was_killed) {
  for (const auto& [topology, fault, victim] : {std::tuple("ring", "kill", 0),
                                                {"ring", "kill_in_backward", 2},
                                                {"exp", "kill", 2},
                                                {"exp", "kill_in_backward", 0}}) {
    const auto ended = train(fault, victim, topology, GetParam());
    EXPECT_EQ(ended[victim].code, 128 + 9);
    for (int rank = 0; rank < 4; ++rank) {
      if (rank == victim) continue;
      const auto& other = ended[rank];
      ASSERT_EQ(other.code, 0) << topology << " " << fault << " rank " << rank << ": " << other.output;
      EXPECT_EQ(text_of(other, "removed"), std::to_string(victim)) << other.output;
      const auto told = "shoal: rank " + std::to_string(rank) + " goes on without rank(s) " + std::to_string(victim);
      const auto first = other.output.find(told);
      EXPECT_NE(first, std::string::npos) << other.output;
      EXPECT_EQ(other.output.find(told, first + 1), std::string::npos) << other.output;
      EXPECT_LT(number(other, "loss"), trained_loss) << other.output;
      EXPECT_LT(number(other, "seconds"), 15) << other.output;
      if (victim != 0) EXPECT_EQ(text_of(other, "mean"), text_of(ended[0], "mean"));
    }
  }
}

TEST_P(GossipFaults, DEC17_the_last_rank_says_that_its_means_are_its_own_values) {
  const auto last = train("kill", 1, "ring", GetParam(), "", 2)[0];
  EXPECT_EQ(last.code, 0) << last.output;
  EXPECT_NE(last.output.find("shoal: rank 0 has lost the other ranks, so global_avg()"), std::string::npos)
      << last.output;
}

TEST_P(GossipFaults, DEC17_a_rank_that_pauses_is_left_out_and_comes_back) {
  const auto ended = train("pause", 1, "ring", GetParam());
  double left_out = 0;
  for (const auto& rank : ended) {
    ASSERT_EQ(rank.code, 0) << rank.output;
    EXPECT_LT(number(rank, "loss"), trained_loss) << rank.output;
    EXPECT_EQ(text_of(rank, "removed"), "");
    EXPECT_EQ(text_of(rank, "mean"), text_of(ended[0], "mean"));
    left_out += number(rank, "skipped") + number(rank, "older");
  }
  EXPECT_GT(left_out, 0);
  // Neighbours wait 0.4 s once as readers and once as writers, and not in every step.
  EXPECT_LT(number(ended[3], "seconds"), number(ended[1], "seconds") + 1);
}

TEST_P(GossipFaults, DEC17_a_new_process_takes_the_place_of_a_rank_that_was_killed) {
  for (const auto& topology : {"ring", "one-peer-exp"}) {
    constexpr int victim = 2;
    const auto ended = train("kill_long", victim, topology, GetParam(), "again");
    for (int rank = 0; rank < 4; ++rank) {
      const auto& one = ended[rank];
      ASSERT_EQ(one.code, 0) << topology << " rank " << rank << ": " << one.output;
      EXPECT_EQ(text_of(one, "removed"), "") << one.output;
      EXPECT_EQ(text_of(one, "rejoined"), rank == victim ? "" : std::to_string(victim)) << one.output;
      EXPECT_EQ(text_of(one, "mean"), text_of(ended[0], "mean"));
      // It added 400 to its own values after showing them; half of that, which its own weight leaves, is shared by all
      // four.
      EXPECT_NEAR(number(one, "bias"), 50, 2) << one.output;
      EXPECT_LT(number(one, "distance"), 1e-6) << one.output;
    }
    EXPECT_GT(number(ended[victim], "step"), 20) << ended[victim].output;
    EXPECT_GT(number(ended[victim], "state"), 0) << "the neighbour's momentum";
  }
}

TEST_P(GossipFaults, BEY03_a_rank_with_fewer_batches_leaves_and_the_others_use_theirs) {
  const auto ended = train("uneven", 3, "exp", GetParam());
  for (int rank = 0; rank < 4; ++rank) {
    ASSERT_EQ(ended[rank].code, 0) << ended[rank].output;
    if (rank == 3) continue;
    EXPECT_LT(number(ended[rank], "loss"), trained_loss) << ended[rank].output;
    EXPECT_NE(text_of(ended[rank], "removed").find('3'), std::string::npos) << ended[rank].output;
    EXPECT_EQ(ended[rank].output.find("goes on without"), std::string::npos) << ended[rank].output;
    EXPECT_LT(number(ended[rank], "seconds"), 10);
  }
}

INSTANTIATE_TEST_SUITE_P(Over, GossipFaults, testing::Values("host", "tcp"),
                         [](const auto& info) { return info.param == "host" ? "shared_memory" : "sockets"; });

}  // namespace
}  // namespace shoal::test
