// What members of an elastic job on several hosts see of each other through the job's store.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstring>
#include <future>
#include <memory>
#include <optional>
#include <set>
#include <thread>
#include <vector>

#include "comm/membership/store_board.h"
#include "comm/store/deadline_store.h"
#include "comm/store/job_store.h"
#include "comm/store/store_server.h"
#include "shoal/error.h"
#include "tests/support/refusal.h"

namespace shoal::store_board_test {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;

// Whether it becomes true in time.
template <class Condition>
bool soon(const Condition& condition, milliseconds limit = milliseconds(3000)) {
  const auto end = std::chrono::steady_clock::now() + limit;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(milliseconds(2));
  }
  return true;
}

BoardEntry entry_of(uint64_t number, bool left = false) {
  return {.card = {.number = number, .grown = 1, .members = {0, 2}, .base = {1}}, .left = left, .lost_with = 3};
}

// Members 0 and 1 on host a, 2 on host b. Each knows by itself who has ended on its host.
class StoreBoardTest : public ::testing::Test {
 protected:
  void SetUp() override {
    server_.emplace(StorePlace("127.0.0.1", 0));
    std::vector<std::future<std::unique_ptr<StoreBoard>>> made;
    for (int self = 0; self < 3; ++self) {
      made.push_back(std::async(std::launch::async, [this, self] {
        StoreBoardOptions options{.store = std::make_shared<PatientStore>(connect(), milliseconds(500)),
                                  .prefix = "job/board",
                                  .generation = "0",
                                  .timeout = std::chrono::seconds(20)};
        return std::make_unique<StoreBoard>(
            std::move(options), self, std::vector<std::string>{"a", "a", "b"},
            [this](int member) { return ended_[member].load(); }, [this, self] { ++noticed_[self]; });
      }));
    }
    for (auto& one : made) boards_.push_back(one.get());
  }
  StorePtr connect() const {
    auto store = connect_store("127.0.0.1", server_->port(), 10);
    store->set_limit(std::chrono::seconds(2));
    return store;
  }

  std::optional<StoreServer> server_;
  std::atomic<bool> ended_[3] = {};
  std::atomic<int> noticed_[3] = {};
  std::vector<std::unique_ptr<StoreBoard>> boards_;
};

TEST_F(StoreBoardTest, ELA01_other_hosts_see_the_entry_whole) {
  EXPECT_TRUE(boards_[0]->has(2));
  EXPECT_FALSE(boards_[0]->has(1));
  const auto entry = entry_of(7);
  boards_[2]->show(to_words(entry));
  for (const int reader : {0, 1}) {
    ASSERT_TRUE(soon([&] { return boards_[reader]->number(2) == 7; }));
    const auto seen = from_words(boards_[reader]->words(2));
    EXPECT_EQ(seen.card, entry.card);
    EXPECT_EQ(seen.lost_with, 3);
    EXPECT_FALSE(boards_[reader]->left(2));
    EXPECT_TRUE(soon([&] { return noticed_[reader] > 0; })) << "a moment after the entry";
  }
  boards_[2]->show(to_words(entry_of(8, true)));
  EXPECT_TRUE(soon([&] { return boards_[0]->left(2); }));
}

TEST_F(StoreBoardTest, ELA02_the_first_answer_to_a_decision_counts_for_all) {
  EXPECT_TRUE(boards_[2]->decide(1, 1, true));
  EXPECT_TRUE(boards_[0]->decide(1, 1, false));
  EXPECT_TRUE(boards_[0]->decide(1, 2, true));
  EXPECT_FALSE(boards_[1]->decide(1, 3, false));
  EXPECT_FALSE(boards_[0]->decide(1, 3, true));
  EXPECT_FALSE(boards_[2]->decide(1, 3, true));
  EXPECT_THROW(boards_[0]->decide(1, 4, true), CommError) << "none follows one that has failed";
  EXPECT_THROW(boards_[0]->decide(2, 2, true), CommError) << "out of turn";
  EXPECT_FALSE(boards_[2]->decide(2, 1, false)) << "of another generation";
  // Many at once.
  for (int64_t number = 1; number <= 20; ++number) {
    std::vector<std::future<bool>> answers;
    for (int self = 0; self < 3; ++self) {
      answers.push_back(std::async(std::launch::async, [this, self, number] {
        return boards_[self]->decide(3, number, number < 20 || self == 1);
      }));
    }
    std::set<bool> all;
    for (auto& answer : answers) all.insert(answer.get());
    EXPECT_EQ(all.size(), 1U) << "decision " << number;
    EXPECT_TRUE(number == 20 || all.contains(true));
  }
  server_.reset();
  EXPECT_THAT(test::refusal<CommError>([&] { boards_[0]->decide(3, 21, true); }), HasSubstr("store"));
}

// A member may end between writing its entry and saying so.
TEST_F(StoreBoardTest, ELA01_a_host_tells_of_its_dead_and_all_see_their_last_words) {
  boards_[1]->show(to_words(entry_of(4)));
  ASSERT_TRUE(soon([&] { return boards_[2]->number(1) == 4; }));
  const auto store = connect();
  auto last = *store_try_get(*store, "job/board/entry/1");
  const auto words = to_words(entry_of(5));
  std::memcpy(last.data(), words.data(), sizeof words);
  store_set(*store, "job/board/entry/1", last);
  EXPECT_FALSE(boards_[2]->gone(1));
  ended_[1] = true;
  for (const int reader : {0, 2}) {
    ASSERT_TRUE(soon([&] { return boards_[reader]->gone(1); }));
    EXPECT_EQ(boards_[reader]->number(1), 5U) << "reader " << reader;
    EXPECT_EQ(from_words(boards_[reader]->words(1)).card.number, 5U);
  }
  EXPECT_FALSE(boards_[2]->gone(0));
}

TEST_F(StoreBoardTest, ELA01_the_launcher_tells_of_the_last_member_of_a_host) {
  JobStore launcher(2, 1, "127.0.0.1", server_->port());
  launcher.begin({});
  launcher.report_end(2);
  ASSERT_TRUE(soon([&] { return boards_[0]->gone(2) && boards_[1]->gone(2); }));
  // Of one among others it is not asked while all of them write.
  launcher.report_end(0);
  std::this_thread::sleep_for(milliseconds(300));
  EXPECT_FALSE(boards_[2]->gone(0));
}

TEST_F(StoreBoardTest, ELA01_a_host_is_silent_once_none_of_its_members_writes) {
  boards_[0].reset();
  std::this_thread::sleep_for(milliseconds(1200));
  EXPECT_FALSE(boards_[2]->silent(0)) << "member 1 of its host writes";
  boards_[1].reset();
  EXPECT_TRUE(soon([&] { return boards_[2]->silent(0) && boards_[2]->silent(1); }));
  EXPECT_FALSE(boards_[2]->gone(0));
}

TEST_F(StoreBoardTest, ELA01_the_first_reader_of_last_words_decides_for_all) {
  const auto store = connect();
  auto words = *store_try_get(*store, "job/board/entry/1");
  const auto first = to_words(entry_of(6));
  std::memcpy(words.data(), first.data(), sizeof first);
  store_set(*store, "job/board/last/1", words);
  ended_[1] = true;
  for (const int reader : {0, 2}) {
    ASSERT_TRUE(soon([&] { return boards_[reader]->gone(1); }));
    EXPECT_EQ(boards_[reader]->number(1), 6U) << "reader " << reader;
  }
}

TEST_F(StoreBoardTest, ELA10_a_store_that_has_ended_is_lost) {
  server_.reset();
  for (const auto& board : boards_) {
    ASSERT_TRUE(soon([&] { return board->is_lost(); }));
    EXPECT_THAT(board->why_lost(), HasSubstr("through its store, which is lost: "));
    EXPECT_THROW(board->show(to_words(entry_of(9))), CommError);
  }
}

TEST_F(StoreBoardTest, ELA10_an_entry_that_no_member_can_have_written_is_no_entry) {
  const auto store = connect();
  store_set(*store, "job/board/entry/2", "short");
  // Again and again, because the member writes its own.
  int changes = 99;
  ASSERT_TRUE(soon([&] {
    store_set(*store, "job/board/beat/2", "1 " + std::to_string(++changes));
    return boards_[0]->is_lost();
  }));
  EXPECT_THAT(boards_[0]->why_lost(), HasSubstr("no entry of rank 2"));
  EXPECT_FALSE(boards_[2]->is_lost());
}

// A store whose next answers about an entry are late.
class LateStore : public c10d::PrefixStore {
 public:
  explicit LateStore(c10::intrusive_ptr<c10d::Store> store) : PrefixStore("late", std::move(store)) {}
  std::vector<uint8_t> get(const std::string& key) override {
    if (key.ends_with("entry/0") && late > 0) {
      --late;
      throw StoreUnreachable("no answer");
    }
    return PrefixStore::get(key);
  }
  std::atomic<int> late = 0;
};

TEST(StoreBoardStall, ELA01_an_entry_that_could_not_be_read_is_read_again) {
  const StoreServer server(StorePlace("127.0.0.1", 0));
  c10::intrusive_ptr<LateStore> reader;
  std::vector<std::future<std::unique_ptr<StoreBoard>>> made;
  for (int self = 0; self < 2; ++self) {
    auto late = c10::make_intrusive<LateStore>(connect_store("127.0.0.1", server.port(), 10));
    if (self == 1) reader = late;
    made.push_back(std::async(std::launch::async, [self, late] {
      auto store = c10::make_intrusive<DeadlineStore>(late, "late", std::chrono::seconds(2));
      StoreBoardOptions options{.store = std::make_shared<PatientStore>(std::move(store)),
                                .prefix = "job/board",
                                .generation = "0",
                                .timeout = std::chrono::seconds(20)};
      return std::make_unique<StoreBoard>(
          std::move(options), self, std::vector<std::string>{"a", "b"}, [](int) { return false; }, [] {});
    }));
  }
  const auto first = made[0].get();
  const auto second = made[1].get();
  reader->late = 3;
  first->show(to_words(entry_of(5)));
  EXPECT_TRUE(soon([&] { return second->number(0) == 5; }));
  EXPECT_EQ(reader->late, 0);
  EXPECT_FALSE(second->is_lost());
}

// Calls are given up after 2 s, and the store is lost after the time of silence only.
TEST(StoreBoardStall, ELA10_a_store_that_stands_still_for_a_while_is_not_lost) {
  StorePlace place("127.0.0.1", 0);
  const int port = place.port();
  const pid_t server = fork();
  if (server == 0) {
    const StoreServer store(std::move(place));
    while (true) pause();
  }
  std::vector<std::future<std::unique_ptr<StoreBoard>>> made;
  for (int self = 0; self < 2; ++self) {
    made.push_back(std::async(std::launch::async, [self, port] {
      auto store = connect_store("127.0.0.1", port, 10);
      store->set_limit(std::chrono::seconds(2));
      StoreBoardOptions options{.store = std::make_shared<PatientStore>(std::move(store)),
                                .prefix = "job/board",
                                .generation = "0",
                                .timeout = std::chrono::seconds(20)};
      return std::make_unique<StoreBoard>(
          std::move(options), self, std::vector<std::string>{"a", "b"}, [](int) { return false; }, [] {});
    }));
  }
  auto first = made[0].get();
  auto second = made[1].get();
  kill(server, SIGSTOP);
  waitpid(server, nullptr, WUNTRACED);  // until all of its threads have stopped
  auto shown = std::async(std::launch::async, [&] { first->show(to_words(entry_of(5))); });
  std::this_thread::sleep_for(std::chrono::seconds(5));
  EXPECT_EQ(shown.wait_for(milliseconds(0)), std::future_status::timeout);
  kill(server, SIGCONT);
  EXPECT_NO_THROW(shown.get());
  EXPECT_TRUE(soon([&] { return second->number(0) == 5; }));
  EXPECT_FALSE(first->is_lost() || second->is_lost());
  first.reset();
  second.reset();
  kill(server, SIGKILL);
  waitpid(server, nullptr, 0);
}

class JobStoreTest : public ::testing::Test {
 protected:
  static std::unique_ptr<JobStore> launcher(int node, int port) {
    return std::make_unique<JobStore>(2, node, "127.0.0.1", port, milliseconds(2000));
  }
};

TEST_F(JobStoreTest, SCA09_reports_of_a_launcher_that_came_first_arrive_later) {
  auto first = launcher(0, 0);
  auto second = launcher(1, first->port());
  second->begin({});
  second->report_failure("rank 3 has failed");
  second->report_end(3);
  std::this_thread::sleep_for(std::chrono::seconds(4));  // more than a try to connect takes
  EXPECT_EQ(first->failure_elsewhere(), "");
  first->begin({});
  EXPECT_TRUE(soon([&] { return first->failure_elsewhere() == "rank 3 has failed"; }, milliseconds(10'000)));
  const auto store = connect_store("127.0.0.1", first->port(), 10);
  EXPECT_TRUE(soon([&] { return store_try_get(*store, ended_key("0", 3)).has_value(); }));
}

TEST_F(JobStoreTest, SCA09_the_launcher_with_the_store_stays_while_others_live) {
  auto first = launcher(0, 0);
  auto second = launcher(1, first->port());
  first->begin({});
  second->begin({});
  first->leave();
  std::this_thread::sleep_for(std::chrono::seconds(4));
  EXPECT_FALSE(first->may_end()) << "the other one lives";
  second->leave();
  EXPECT_TRUE(soon([&] { return second->may_end() && first->may_end(); }, milliseconds(10'000)));
}

TEST_F(JobStoreTest, SCA09_the_launcher_with_the_store_does_not_stay_for_one_that_was_killed) {
  auto first = launcher(0, 0);
  auto second = launcher(1, first->port());
  first->begin({});
  second->begin({});
  first->leave();
  second.reset();
  EXPECT_TRUE(soon([&] { return first->may_end(); }, milliseconds(15'000)));
}

}  // namespace
}  // namespace shoal::store_board_test
