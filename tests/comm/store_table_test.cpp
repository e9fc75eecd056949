// The table of the processes of an elastic job on several hosts, in the job's store.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <memory>
#include <set>
#include <vector>

#include "comm/membership/store_table.h"
#include "comm/store/job_store.h"
#include "comm/store/store_server.h"
#include "shoal/error.h"
#include "tests/support/refusal.h"

namespace shoal::store_table_test {
namespace {

using std::chrono::milliseconds;
using test::refusal;
using testing::ElementsAre;
using testing::HasSubstr;

Peer peer_on(const std::string& host, int pid) {
  return {host, {pid, 7}, {pid, 3, uint64_t{1} << 63 | static_cast<uint64_t>(pid)}};
}

class StoreTableTest : public ::testing::Test {
 protected:
  StorePtr connect() const {
    auto store = connect_store("127.0.0.1", server_.port(), 10);
    store->set_limit(std::chrono::seconds(2));
    return store;
  }
  // As a process has it; a newcomer's is not opened.
  std::unique_ptr<StoreTable> table(const std::string& prefix = "job/board") const {
    auto made = std::make_unique<StoreTable>(std::make_shared<PatientStore>(connect(), milliseconds(500)), "0",
                                             OpenJob{2, 4, "127.0.0.1", server_.port()});
    if (!prefix.empty()) made->open(prefix);
    return made;
  }

  const StoreServer server_{StorePlace("127.0.0.1", 0)};
};

TEST_F(StoreTableTest, ELA06_a_newcomer_finds_the_members_and_they_find_it) {
  const auto first = table();
  const auto newcomer = table("");
  newcomer->refresh();
  EXPECT_FALSE(newcomer->description()) << "there is no job yet";
  first->make({peer_on("a", 11), peer_on("b", 12)});
  newcomer->refresh();
  EXPECT_EQ(newcomer->prefix(), "") << "not all members are there";
  first->announce();
  newcomer->refresh();
  ASSERT_EQ(newcomer->prefix(), "job/board");
  EXPECT_FALSE(newcomer->description());
  first->publish("module: Net\n");
  first->publish("another\n");
  EXPECT_EQ(newcomer->description(), "module: Net\n");
  ASSERT_EQ(newcomer->peers().size(), 2U);
  EXPECT_EQ(newcomer->peers()[1].host, "b");
  EXPECT_EQ(newcomer->peers()[1].page.nonce, peer_on("b", 12).page.nonce);
  EXPECT_TRUE(newcomer->is_member(1));
  EXPECT_FALSE(newcomer->is_member(5));

  newcomer->knock(5, peer_on("c", 13));  // 2 to 4 were given to processes that have not come
  EXPECT_FALSE(first->anyone_knocks());
  EXPECT_TRUE(first->follow("1"));
  EXPECT_FALSE(first->follow("1")) << "nothing is new";
  EXPECT_THAT(first->knocking(), ElementsAre(5));
  ASSERT_EQ(first->peers().size(), 6U);
  EXPECT_EQ(first->peers()[3].process.pid, 0);
  EXPECT_EQ(first->peers()[5].host, "c");
  EXPECT_TRUE(first->claim(5));
  EXPECT_TRUE(first->claim(5)) << "a member that has ended may have begun";
  newcomer->admitted(5);
  EXPECT_TRUE(newcomer->is_member(5));
  EXPECT_TRUE(connect()->check({joined_key("0", 5)}));
  EXPECT_FALSE(first->claim(5));
  EXPECT_TRUE(first->knocking().empty());
}

TEST_F(StoreTableTest, ELA06_a_number_is_used_once_and_a_knock_that_was_repeated_counts_once) {
  const auto one = table();
  one->make({peer_on("a", 11), peer_on("b", 12)});
  one->knock(2, peer_on("c", 13));
  one->knock(2, peer_on("c", 13));
  EXPECT_THAT(refusal<UsageError>([&] { table()->knock(2, peer_on("d", 14)); }), HasSubstr("was used before"));
  EXPECT_THAT(refusal<UsageError>([&] { one->knock(1, peer_on("d", 14)); }), HasSubstr("this is number 1"));
  EXPECT_THROW(one->knock(JoinTable::most_members, peer_on("d", 14)), UsageError);
}

TEST_F(StoreTableTest, ELA06_a_refusal_stays_and_a_withdrawal_says_whether_the_admission_has_begun) {
  const auto one = table();
  const auto two = table();
  one->make({peer_on("a", 11), peer_on("b", 12)});
  for (int number = 2; number < 5; ++number) one->knock(number, peer_on("c", 11 + number));
  two->refuse(2, "it has\nno\tpage");
  one->refuse(2, "another reason");
  one->admitted(2);
  EXPECT_TRUE(one->is_refused(2));
  EXPECT_TRUE(one->withdraw(3)) << "nobody has begun to admit it";
  EXPECT_TRUE(one->claim(4));
  EXPECT_FALSE(one->withdraw(4));
  two->refresh();
  EXPECT_THAT(two->refusal(2), HasSubstr("it has"));
  EXPECT_TRUE(two->knocking().empty());
  EXPECT_FALSE(two->claim(3));
  two->release(4);
  EXPECT_TRUE(two->knocking().empty()) << "it has withdrawn";
  one->close("full");
  two->close("another");
  EXPECT_EQ(two->why_closed(), "full");
}

TEST_F(StoreTableTest, ELA06_many_processes_change_it_at_once) {
  table()->make({peer_on("a", 11), peer_on("b", 12)});
  std::vector<std::future<void>> all;
  for (int i = 0; i < 8; ++i) {
    all.push_back(std::async(std::launch::async, [this, i] {
      const auto own = table();
      for (int number = 2 + 4 * i; number < 6 + 4 * i; ++number) own->knock(number, peer_on("c", 100 + number));
    }));
  }
  for (auto& one : all) one.get();
  const auto reader = table();
  reader->refresh();
  EXPECT_EQ(reader->knocking().size(), 32U);
  EXPECT_EQ(reader->changes(), 33U);
}

TEST_F(StoreTableTest, ELA06_what_is_no_table_is_refused_before_memory_is_taken_for_it) {
  const auto first = table();
  first->publish(std::string(JoinTable::most_text + 1, 'x'));
  EXPECT_FALSE(first->description());
  EXPECT_THAT(first->why_closed(), HasSubstr("too long"));
  for (const auto& text :
       {std::string("no JSON"), std::string(R"({"version":1,"closed":"","entries":[[1024,1,"a",1,1,1,1,""]]})"),
        std::string(R"({"version":1,"closed":"","entries":[[2,9,"a",1,1,1,1,""]]})"),
        std::string(R"({"version":1,"closed":"","entries":[[2]]})"), std::string(size_t{2} << 20, '[')}) {
    const auto prefix = "damaged" + std::to_string(text.size());
    store_set(*connect(), prefix + "/table", text);
    const auto reader = table(prefix);
    // A long text may take longer to come than a refresh waits.
    std::string refused;
    for (int i = 0; i < 100 && refused.find("is damaged") == std::string::npos; ++i) {
      refused = refusal<CommError>([&] { reader->refresh(); });
    }
    EXPECT_THAT(refused, HasSubstr("is damaged")) << text.substr(0, 50);
    EXPECT_TRUE(reader->store()->is_lost());
  }
}

class OpenJobTest : public ::testing::Test {
 protected:
  static bool soon(const std::function<bool()>& condition) {
    for (int i = 0; i < 2000; ++i) {
      if (condition()) return true;
      std::this_thread::sleep_for(milliseconds(5));
    }
    return false;
  }
  static int number_from(JobStore& store) {
    std::optional<int> number;
    EXPECT_TRUE(soon([&] { return (number = store.take_number()).has_value(); }));
    return number.value_or(-1);
  }
};

TEST_F(OpenJobTest, ELA06_launchers_get_nodes_and_numbers_of_their_own) {
  JobStore first(2, 0, "127.0.0.1", 0, milliseconds(2000));
  first.open({.first_ranks = 4, .most_ranks = 8, .min_ranks = 1});
  first.begin({});
  JobStore second(2, 1, "127.0.0.1", first.port());
  second.begin({});
  const auto terms = JobStore::find("127.0.0.1", first.port(), {}, 10);
  EXPECT_EQ(terms.first_ranks, 4);
  EXPECT_EQ(terms.most_ranks, 8);
  EXPECT_EQ(terms.min_ranks, 1);
  EXPECT_EQ(terms.node, 2);
  EXPECT_EQ(JobStore::find("127.0.0.1", first.port(), {}, 10).node, 3);
  JobStore third(terms.node + 1, terms.node, "127.0.0.1", first.port());
  third.begin({});
  for (auto* store : {&first, &second, &third, &third}) store->ask_for_number(4);
  std::set<int> numbers;
  for (auto* store : {&first, &second, &third, &third}) numbers.insert(number_from(*store));
  EXPECT_EQ(numbers, std::set<int>({4, 5, 6, 7}));
  EXPECT_FALSE(first.take_number());

  second.ask_for_number(4);
  const int number = number_from(second);
  EXPECT_FALSE(second.has_joined(number, /*wait=*/true));
  const auto store = connect_store("127.0.0.1", first.port(), 10);
  store_set(*store, joined_key("0", number), "joined");
  EXPECT_TRUE(second.has_joined(number, /*wait=*/true));
  EXPECT_TRUE(second.has_joined(number, /*wait=*/false));

  // Node 0 waits for launchers that have come, too; node 3 never had one, and is taken for ended.
  first.leave();
  second.leave();
  EXPECT_TRUE(soon([&] { return second.may_end(); }));
  std::this_thread::sleep_for(milliseconds(4000));
  EXPECT_FALSE(first.may_end());
  third.leave();
  EXPECT_TRUE(soon([&] { return third.may_end() && first.may_end(); }));
}

TEST_F(OpenJobTest, ELA06_a_job_that_takes_in_no_hosts_says_so) {
  JobStore first(2, 0, "127.0.0.1", 0);
  first.open({.first_ranks = 4});
  first.begin({});
  EXPECT_THAT(refusal<UsageError>([&] { JobStore::find("127.0.0.1", first.port(), {}, 10); }),
              HasSubstr("takes in no hosts"));
  const StoreServer secretive(StorePlace("127.0.0.1", 0), JobIdentity("job", "0123456789abcdef0123456789abcdef"));
  EXPECT_THAT(refusal<UsageError>([&] { JobStore::find("127.0.0.1", secretive.port(), {}, 10); }),
              HasSubstr("set its SHOAL_SECRET"));
  StorePlace nobody("127.0.0.1", 0);
  EXPECT_THAT(refusal<UsageError>([&] { JobStore::find("127.0.0.1", nobody.port(), {}, 1); }),
              HasSubstr("that this host can join"));
}

}  // namespace
}  // namespace shoal::store_table_test
