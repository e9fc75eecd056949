// Deadlines of all calls to the job's store.

#include "comm/store/deadline_store.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <unistd.h>

#include <torch/csrc/distributed/c10d/exception.h>
#include <atomic>
#include <chrono>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "comm/membership/patient_store.h"
#include "comm/rendezvous/socket.h"
#include "comm/store/given_store.h"
#include "comm/store/store.h"
#include "comm/store/store_lost.h"
#include "comm/store/store_server.h"
#include "tests/support/refusal.h"

namespace shoal::deadline_store_test {
namespace {

using namespace std::chrono_literals;
using SteadyClock = std::chrono::steady_clock;

// Store in this process that can be stopped like a process.
class StoppableStore : public c10d::HashStore {
 public:
  c10::intrusive_ptr<c10d::Store> clone() override {
    pass();
    return HashStore::clone();
  }
  std::vector<uint8_t> get(const std::string& key) override {
    pass();
    return HashStore::get(key);
  }
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    pass();
    HashStore::set(key, value);
  }
  bool check(const std::vector<std::string>& keys) override {
    pass();
    return HashStore::check(keys);
  }
  int64_t add(const std::string& key, int64_t value) override {
    pass();
    return HashStore::add(key, value);
  }

  std::atomic<bool> stopped = false;

 private:
  void pass() const {
    while (stopped) std::this_thread::sleep_for(1ms);
  }
};

// Store that takes time to end, like a FileStore, whose destructor writes.
class SlowToEnd : public c10d::HashStore {
 public:
  explicit SlowToEnd(std::atomic<bool>& ended) : ended_(ended) {}
  ~SlowToEnd() override {
    std::this_thread::sleep_for(50ms);
    ended_ = true;
  }

 private:
  std::atomic<bool>& ended_;
};

struct Stores {
  c10::intrusive_ptr<StoppableStore> inner = c10::make_intrusive<StoppableStore>();
  StorePtr store = c10::make_intrusive<DeadlineStore>(inner, "host:1", 200ms);
};

double seconds_of(const std::function<void()>& act) {
  const auto begin = SteadyClock::now();
  act();
  return std::chrono::duration<double>(SteadyClock::now() - begin).count();
}

TEST(DeadlineStore, gives_what_the_store_gives) {
  const Stores stores;
  auto& store = *stores.store;
  EXPECT_EQ(store_try_get(store, "a"), std::nullopt);
  store_set(store, "a", "1");
  EXPECT_EQ(store_try_get(store, "a"), "1");
  EXPECT_EQ(store_set_once(store, "a", "2"), "1");
  EXPECT_EQ(store.add("n", 3), 3);
  EXPECT_EQ(store.add("n", 4), 7);
  EXPECT_TRUE(store.deleteKey("a"));
  EXPECT_FALSE(store.check({"a"}));
}

TEST(DeadlineStore, waiting_for_a_key_ends_when_it_is_set_and_at_the_time_out) {
  const Stores stores;
  std::thread later([&] {
    std::this_thread::sleep_for(300ms);  // longer than a call may take
    store_set(*stores.store, "late", "here");
  });
  const auto value = stores.store->get("late");
  later.join();
  EXPECT_EQ(std::string(value.begin(), value.end()), "here");
  EXPECT_THROW(stores.store->wait({"never"}, 50ms), c10::DistStoreError);
}

TEST(DeadlineStore, a_stopped_store_is_named_after_the_limit_and_then_at_once) {
  const Stores stores;
  stores.inner->stopped = true;
  std::string said;
  EXPECT_NEAR(seconds_of([&] { said = test::refusal<StoreUnreachable>([&] { store_set(*stores.store, "a", "1"); }); }),
              0.2, 0.15);
  EXPECT_NE(said.find("the job's store at host:1 does not answer within 0.2 s"), std::string::npos) << said;
  for (int call = 0; call < 5; ++call) {
    EXPECT_LT(seconds_of([&] { EXPECT_THROW(store_try_get(*stores.store, "a"), StoreUnreachable); }), 0.1);
  }
  EXPECT_LT(seconds_of([&] { EXPECT_THROW(stores.store->get("a"), StoreUnreachable); }), 0.1)
      << "whatever its time-out";
  stores.inner->stopped = false;
}

// The limit of a call is shorter than the time for which a store may be silent.
TEST(PatientStore, ELA10_a_lost_store_says_how_long_it_was_asked) {
  const Stores stores;
  stores.inner->stopped = true;
  PatientStore patient(stores.store, 600ms);
  const auto ask = [&] { patient.ask([](DeadlineStore& store) { store_set(store, "a", "1"); }); };
  const auto said = test::refusal<CommError>(ask);
  EXPECT_NE(said.find("it was asked again for 0.6 s"), std::string::npos) << said;
  EXPECT_EQ(patient.why_lost(), said);
  stores.inner->stopped = false;
}

TEST(GuardStore, a_stopped_store_is_named_after_the_limit) {
  const auto given = c10::make_intrusive<StoppableStore>();
  given->stopped = true;
  std::string said;
  EXPECT_NEAR(seconds_of([&] { said = test::refusal<StoreUnreachable>([&] { guard_store(given, 1, {}); }); }), 1, 0.5);
  EXPECT_NE(said.find("the given store does not answer within 1 s"), std::string::npos) << said;
  given->stopped = false;
}

TEST(DeadlineStore, a_store_that_continues_is_asked_again) {
  const Stores stores;
  stores.inner->stopped = true;
  EXPECT_THROW(stores.store->add("n", 1), StoreUnreachable);
  stores.inner->stopped = false;
  std::this_thread::sleep_for(100ms);
  EXPECT_EQ(stores.store->add("n", 1), 2) << "what was given up has taken effect";
}

// c10d's client would go on to fail, and print a stack trace each time.
TEST(DeadlineStore, a_connection_that_is_lost_stays_lost) {
  auto server = std::make_unique<StoreServer>(StorePlace("127.0.0.1", 0), JobIdentity());
  const auto store = connect_store("127.0.0.1", server->port(), 5);
  store_set(*store, "a", "1");
  server.reset();
  const auto ask = [&] { store_try_get(*store, "a"); };
  const auto said = test::refusal<StoreLost>(ask);
  EXPECT_NE(said.find("lost the connection to the job's store at 127.0.0.1:"), std::string::npos) << said;
  testing::internal::CaptureStderr();
  EXPECT_EQ(test::refusal<StoreLost>(ask), said);
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

TEST(DeadlineStore, may_go_while_a_call_hangs) {
  auto stores = std::make_unique<Stores>();
  const auto inner = stores->inner;
  inner->stopped = true;
  EXPECT_THROW(store_set(*stores->store, "a", "1"), StoreUnreachable);
  EXPECT_LT(seconds_of([&] { stores.reset(); }), 0.1);
  inner->stopped = false;
}

TEST(DeadlineStore, has_let_go_of_the_store_when_it_ends) {
  std::atomic<bool> ended = false;
  StorePtr store = c10::make_intrusive<DeadlineStore>(c10::make_intrusive<SlowToEnd>(ended), "host:1", 2000ms);
  store->add("n", 1);
  store.reset();
  EXPECT_TRUE(ended) << "a process that exits now would cut the destructor off";
}

TEST(DeadlineStore, serves_many_threads_and_prefixes) {
  const Stores stores;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 8; ++thread) {
    threads.emplace_back([&] {
      c10d::PrefixStore store("p", stores.store);
      for (int call = 0; call < 50; ++call) store.add("n", 1);
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(stores.store->add("p/n", 0), 400);
}

// Socket that accepts connections and sends `answer`, or nothing.
class Stranger {
 public:
  explicit Stranger(std::string answer) : answer_(std::move(answer)) {
    thread_ = std::thread([this] {
      while (true) {
        const Descriptor accepted(accept(listening_.number(), nullptr, nullptr));
        if (!accepted.open() || ended_) return;
        if (!answer_.empty()) {
          [[maybe_unused]] const auto sent = write(accepted.number(), answer_.data(), answer_.size());
        } else {
          open_.push_back(dup(accepted.number()));
        }
      }
    });
  }
  ~Stranger() {
    ended_ = true;
    shutdown(listening_.number(), SHUT_RDWR);
    thread_.join();
    for (const int fd : open_) close(fd);
  }
  int port() const { return own_address(listening_).port(); }

 private:
  std::string answer_;
  Descriptor listening_ = listen_on(resolve("127.0.0.1", 0));
  std::vector<int> open_;
  std::atomic<bool> ended_ = false;
  std::thread thread_;
};

TEST(ConnectStore, who_does_not_answer_is_told_from_who_answers_wrongly) {
  const Stranger silent(""), garrulous("HTTP/1.1 400 Bad Request\r\n\r\n");
  const auto quiet = test::refusal<CommError>([&] { connect_store("127.0.0.1", silent.port(), 2); });
  EXPECT_NE(quiet.find("did not answer within 2 s"), std::string::npos) << quiet;
  const auto loud = test::refusal<CommError>([&] { connect_store("127.0.0.1", garrulous.port(), 2); });
  EXPECT_NE(loud.find("is not the job's store"), std::string::npos) << loud;
}

// A name may become known while others start, or be a typo, of which people hear before the time is over.
TEST(ConnectStore, a_name_that_is_not_known_is_named_soon_and_asked_again_until_the_deadline) {
  std::string said;
  testing::internal::CaptureStderr();
  EXPECT_GE(seconds_of([&] { said = test::refusal<UsageError>([&] { connect_store("shoal-0..none", 29511, 4); }); }),
            4);
  const auto told = testing::internal::GetCapturedStderr();
  const std::string line = "shoal: the name 'shoal-0..none' is not known: ";  // c10d may log beside it
  EXPECT_NE(told.find(line), std::string::npos) << told;
  EXPECT_EQ(told.find(line), told.rfind(line)) << "once: " << told;
  EXPECT_NE(said.find("cannot resolve the address 'shoal-0..none'"), std::string::npos) << said;
  EXPECT_NE(said.find("(tried for 4 s)"), std::string::npos) << said;
  EXPECT_NE(said.find("MASTER_ADDR"), std::string::npos) << said;
  const auto never = seconds_of([] { test::refusal<UsageError>([] { connect_store("[::1]", 29511, 30); }); });
  EXPECT_LT(never, 15) << "what can never be a name is not waited for";
}

TEST(ConnectStore, a_back_log_that_is_full_swallows_no_more_than_the_deadline) {
  // Like a missing host: the connection is neither accepted nor refused.
  const auto address = resolve("127.0.0.1", 0);
  const auto listening = make_socket(address, SOCK_STREAM);
  ASSERT_EQ(bind(listening.number(), address.get(), address.length), 0);
  ASSERT_EQ(listen(listening.number(), 0), 0);
  const auto full = own_address(listening);
  std::vector<Descriptor> waiting;
  for (int i = 0; i < 4; ++i) {
    waiting.push_back(make_socket(full, SOCK_STREAM | SOCK_NONBLOCK));
    connect_to(waiting.back(), full);
  }
  std::string said;
  EXPECT_LT(seconds_of([&] { said = test::refusal<CommError>([&] { connect_store("127.0.0.1", full.port(), 2); }); }),
            6);
  EXPECT_NE(said.find("no server at"), std::string::npos) << said;
}

}  // namespace
}  // namespace shoal::deadline_store_test
