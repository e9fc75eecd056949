// Store in shared memory: as c10d's HashStore in one process, whole after the death of any process, and bounded.

#include "comm/membership/memory_store.h"

#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <random>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "shoal/error.h"

namespace shoal {
namespace {

using Value = std::vector<uint8_t>;

Value value_of(const std::string& text) {
  return {text.begin(), text.end()};
}

c10::intrusive_ptr<MemoryStore> opened(const MemoryStore& store, size_t bytes) {
  return c10::make_intrusive<MemoryStore>(getpid(), store.descriptor(), store.nonce(), bytes);
}

// Each of the two halves has room for about 60 of these records.
constexpr size_t small = 16384;

TEST(MemoryStore, ELA06_does_what_hash_store_does_whichever_process_asks) {
  MemoryStore first(small);
  const auto second = opened(first, small);
  auto expected = c10::make_intrusive<c10d::HashStore>();
  std::mt19937 random(1);
  for (int i = 0; i < 3000; ++i) {
    SCOPED_TRACE(i);
    c10d::Store& store = random() % 2 == 0 ? static_cast<c10d::Store&>(first) : *second;
    const auto key = "key " + std::to_string(random() % 12);
    const auto value = value_of(std::string(random() % 150, static_cast<char>('a' + random() % 26)) + "x");
    const bool present = expected->check({key});
    EXPECT_EQ(store.check({key}), present);
    switch (random() % 5) {
      case 0:
        store.set(key, value);
        expected->set(key, value);
        break;
      case 1:
        EXPECT_EQ(store.deleteKey(key), present);
        expected->deleteKey(key);
        break;
      case 2: {
        const auto before = present && random() % 2 == 0 ? expected->get(key) : value_of("other");
        EXPECT_EQ(store.compareSet(key, before, value), expected->compareSet(key, before, value));
        break;
      }
      case 3:
        EXPECT_EQ(store.add("number", 3), expected->add("number", 3));
        break;
      default:
        EXPECT_TRUE(!present || store.get(key) == expected->get(key));
    }
    EXPECT_EQ(store.getNumKeys(), expected->getNumKeys());
  }
}

TEST(MemoryStore, what_is_absent_is_an_error_after_the_time_that_is_given) {
  MemoryStore store(small);
  EXPECT_THROW(store.get("nothing"), c10::DistStoreError);
  EXPECT_THROW(store.wait({"nothing"}, std::chrono::milliseconds(20)), c10::DistStoreError);
  EXPECT_EQ(store.compareSet("key", {}, value_of("one")), value_of("one"));
  EXPECT_EQ(store.compareSet("key", {}, value_of("two")), value_of("one"));
  EXPECT_THROW(MemoryStore(getpid(), 9999, store.nonce(), small), CommError);
  EXPECT_THROW(MemoryStore(getpid(), store.descriptor(), store.nonce() + 1, small), CommError) << "another file";
}

TEST(MemoryStore, is_full_with_an_error_and_stays_whole) {
  MemoryStore store(small);
  int keys = 0;
  const Value value(400, 7);
  const auto fill = [&] {
    for (; keys < 1000; ++keys) store.set(std::to_string(keys), value);
  };
  EXPECT_THROW(fill(), CommError);
  EXPECT_GT(keys, 10);
  EXPECT_EQ(store.getNumKeys(), keys);
  const auto other = opened(store, small);
  EXPECT_EQ(other->get("3"), value);
  for (int key = keys - 1; key >= 0; --key) EXPECT_TRUE(store.deleteKey(std::to_string(key)));
  EXPECT_EQ(other->getNumKeys(), 0);
  store.set("more", value);
  EXPECT_EQ(other->get("more"), value);
}

// Calls act(store) in a process of its own, which ends with this one.
template <class Act>
pid_t in_process(const MemoryStore& store, size_t bytes, const Act& act) {
  const int parent = getpid();
  const auto nonce = store.nonce();
  const auto process = fork();
  if (process != 0) return process;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  try {
    MemoryStore own(parent, store.descriptor(), nonce, bytes);
    act(own);
  } catch (...) {
    std::_Exit(1);
  }
  std::_Exit(0);
}

TEST(MemoryStore, ELA06_threads_and_processes_take_turns) {
  MemoryStore store(small);
  const auto count = [](MemoryStore& from) {
    for (int i = 0; i < 2000; ++i) from.add("number", i % 3);
  };
  std::vector<pid_t> processes;
  for (int i = 0; i < 2; ++i) processes.push_back(in_process(store, small, count));
  std::thread thread([&] { count(store); });
  count(store);
  thread.join();
  for (const auto process : processes) {
    int status = 0;
    waitpid(process, &status, 0);
    EXPECT_EQ(status, 0);
  }
  EXPECT_EQ(store.add("number", 0), 4 * 1999);
}

// Processes write long values of one letter each, and are killed at random moments.
TEST(MemoryStore, ELA02_a_process_that_is_killed_in_a_call_leaves_the_store_whole) {
  constexpr size_t bytes = 1 << 20, length = 60000;
  MemoryStore store(bytes);
  std::mt19937 random(2);
  int64_t before = 0;
  for (int trial = 0; trial < 100; ++trial) {
    std::vector<pid_t> processes;
    for (int i = 0; i < 2; ++i) {
      processes.push_back(in_process(store, bytes, [i](MemoryStore& own) {
        for (int round = 0;; ++round) {
          own.set("of " + std::to_string(i), Value(length, static_cast<uint8_t>('a' + round % 26)));
          own.add("number", 1);
        }
      }));
    }
    while (store.add("number", 0) < before + 5) std::this_thread::sleep_for(std::chrono::microseconds(100));
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
    for (const auto process : processes) kill(process, SIGKILL);
    for (const auto process : processes) waitpid(process, nullptr, 0);
    const auto number = store.add("number", 0);
    ASSERT_GE(number, before + 5);
    ASSERT_LE(store.getNumKeys(), 3);
    for (const auto* key : {"of 0", "of 1"}) {
      if (!store.check({key})) continue;
      const auto value = store.get(key);
      ASSERT_EQ(value.size(), length);
      ASSERT_EQ(std::count(value.begin(), value.end(), value.front()), static_cast<int64_t>(length)) << "torn";
    }
    before = number;
  }
}

}  // namespace
}  // namespace shoal
