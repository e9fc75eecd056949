// The table in which newcomers of an elastic job and its members find each other.

#include "comm/membership/join_board.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <map>

#include "comm/rendezvous/rendezvous.h"
#include "shoal/error.h"

namespace shoal::join_board_test {
namespace {

Environment environment_of(const std::map<std::string, std::string>& variables) {
  return [variables](const std::string& name) {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  };
}

Peer own_peer() {
  return {.host = host_identity(), .process = this_process(), .page = {getpid(), 5, 77}};
}

std::string refusal_of(const std::map<std::string, std::string>& variables) {
  try {
    find_join(environment_of(variables));
  } catch (const UsageError& error) {
    return error.what();
  }
  return "";
}

TEST(JoinBoard, ELA06_entries_are_seen_through_another_mapping) {
  JoinBoard board("job/1", 2);
  JoinBoard seen(board.address());
  EXPECT_EQ(seen.job(), "job/1");
  EXPECT_EQ(seen.first_ranks(), 2);
  board.enter(0, own_peer());
  EXPECT_FALSE(board.anyone_knocks());
  seen.knock(3, own_peer());
  EXPECT_TRUE(board.anyone_knocks());
  EXPECT_EQ(board.knocking(), std::vector<int>({3}));
  EXPECT_THROW(seen.knock(3, own_peer()), UsageError) << "a number is for one process";
  EXPECT_THROW(seen.knock(JoinTable::most_members, own_peer()), UsageError);
  const auto peers = board.peers();
  ASSERT_EQ(peers.size(), 4U);
  EXPECT_EQ(peers[0].process.pid, getpid());
  EXPECT_EQ(peers[1].process.pid, 0) << "has not come";
  EXPECT_EQ(peers[3].page.nonce, 77U);
  EXPECT_TRUE(board.claim(3));
  EXPECT_TRUE(board.claim(3)) << "by another member, after the death of the first";
  EXPECT_FALSE(seen.withdraw(3)) << "it is being admitted";
  EXPECT_FALSE(board.anyone_knocks());
  EXPECT_FALSE(board.claim(3));
  seen.knock(4, own_peer());
  EXPECT_TRUE(board.claim(4));
  seen.admitted(4);
  EXPECT_TRUE(board.is_member(4));
  EXPECT_TRUE(seen.withdraw(4)) << "a member that does not fit";
  EXPECT_FALSE(board.is_member(4));
  EXPECT_TRUE(board.was_admitted(4));
  EXPECT_FALSE(board.was_admitted(3));
  board.refuse(2, "no room\n");
  EXPECT_EQ(seen.refusal(2).substr(0, 7), "no room");
}

TEST(JoinBoard, ELA06_a_refusal_stays_whatever_the_newcomer_does_and_has_the_first_reason) {
  JoinBoard board("job/1", 2);
  board.knock(3, own_peer());
  EXPECT_TRUE(board.claim(3));
  board.refuse(3, "first");
  board.refuse(3, "second");
  board.admitted(3);
  EXPECT_FALSE(board.is_member(3));
  EXPECT_TRUE(board.withdraw(3));
  EXPECT_TRUE(board.is_refused(3));
  EXPECT_EQ(board.refusal(3), "first");
  board.knock(4, own_peer());
  EXPECT_TRUE(board.claim(4));
  board.admitted(4);
  EXPECT_TRUE(board.is_member(4));
  board.withdraw(4);
  EXPECT_FALSE(board.is_member(4)) << "it has left before its first step";
}

TEST(JoinBoard, ELA06_a_description_is_bounded) {
  JoinBoard board("", 1);
  JoinBoard seen(board.address());
  EXPECT_FALSE(seen.description());
  board.publish(std::string(JoinTable::most_text + 1, 'x'));
  EXPECT_FALSE(seen.description());
  EXPECT_NE(seen.why_closed(), "");
  JoinBoard other("", 1);
  other.publish("a\nb\n");
  other.publish("c\n");
  EXPECT_EQ(JoinBoard(other.address()).description(), "a\nb\n");
}

TEST(JoinBoard, ELA06_an_address_that_leads_elsewhere_is_refused) {
  const JoinBoard board("job", 1);
  const auto address = board.address();
  EXPECT_THROW(JoinBoard(std::string("nonsense")), UsageError);
  EXPECT_THROW(JoinBoard("1 2"), UsageError);
  EXPECT_THROW(JoinBoard("-5 2 3 job"), UsageError);
  EXPECT_THROW(JoinBoard("999999999 2 3 job"), std::runtime_error);
  const auto file = shm::MemoryFile::create(4096);  // too small, and without a board
  EXPECT_THROW(JoinBoard(std::to_string(getpid()) + " " + std::to_string(file.descriptor()) + " 0 job"),
               std::runtime_error);
  const auto empty = shm::MemoryFile::create(4 << 20);
  EXPECT_THROW(JoinBoard(std::to_string(getpid()) + " " + std::to_string(empty.descriptor()) + " 0 job"),
               std::runtime_error);
}

TEST(JoinBoard, ELA06_a_newcomer_is_told_what_is_wrong_with_its_environment) {
  const JoinBoard board("job", 2);
  const auto address = board.address();
  const auto good =
      find_join(environment_of({{"SHOAL_JOB", "job"}, {"SHOAL_ELASTIC", address}, {"SHOAL_JOIN", "2 job"}}));
  EXPECT_EQ(good.number, 2);
  ASSERT_TRUE(good.table);
  const auto member = find_join(environment_of({{"SHOAL_JOB", "job"}, {"SHOAL_ELASTIC", address}}));
  EXPECT_FALSE(member.number);
  EXPECT_TRUE(member.table);
  for (const auto* text : {"x", "-3 job", "", "two job"}) {
    if (*text == 0) continue;  // an Environment has no empty variables
    EXPECT_NE(refusal_of({{"SHOAL_JOB", "job"}, {"SHOAL_ELASTIC", address}, {"SHOAL_JOIN", text}}).find("SHOAL_JOIN='"),
              std::string::npos)
        << text;
  }
  EXPECT_NE(refusal_of({{"SHOAL_JOB", "job"}, {"SHOAL_JOIN", "2 job"}}).find("SHOAL_ELASTIC is not set"),
            std::string::npos);
  EXPECT_NE(refusal_of({{"SHOAL_JOB", "job"}, {"SHOAL_ELASTIC", "z"}, {"SHOAL_JOIN", "2 job"}}).find("no address"),
            std::string::npos);
  for (const auto* text : {"1 job", "1024 job"}) {
    EXPECT_NE(refusal_of({{"SHOAL_JOB", "job"}, {"SHOAL_ELASTIC", address}, {"SHOAL_JOIN", text}}).find("2 to 1023"),
              std::string::npos)
        << text;
  }
}

TEST(JoinBoard, ELA10_all_ranks_are_told_the_least_of_their_launcher) {
  EXPECT_EQ(
      find_join(environment_of({{"SHOAL_JOB", "job"}, {"MASTER_PORT", "29500"}, {"SHOAL_ELASTIC_MIN", "2 29500 job"}}))
          .min_ranks,
      2);
  EXPECT_EQ(find_join(environment_of(
                          {{"SHOAL_JOB", "job/7"}, {"MASTER_PORT", "29500"}, {"SHOAL_ELASTIC_MIN", "2 29500 job"}}))
                .min_ranks,
            0);
  EXPECT_EQ(
      find_join(environment_of({{"SHOAL_JOB", "job"}, {"MASTER_PORT", "1"}, {"SHOAL_ELASTIC_MIN", "2 29500 job"}}))
          .min_ranks,
      0);
  EXPECT_NE(refusal_of({{"SHOAL_JOB", "job"}, {"SHOAL_ELASTIC_MIN", "x job"}}).find("SHOAL_ELASTIC_MIN='x job'"),
            std::string::npos);
}

// A job that a rank of this one starts is another one.
TEST(JoinBoard, ELA06_variables_of_an_enclosing_job_do_not_count) {
  const JoinBoard board("job", 2);
  const auto nested =
      find_join(environment_of({{"SHOAL_JOB", "job/7"}, {"SHOAL_ELASTIC", board.address()}, {"SHOAL_JOIN", "2 job"}}));
  EXPECT_FALSE(nested.number);
  EXPECT_FALSE(nested.table);
}

}  // namespace
}  // namespace shoal::join_board_test
