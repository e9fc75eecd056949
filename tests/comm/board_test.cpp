// What members of an elastic job see of each other: words that are shown whole, and the end of a process.

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <thread>

#include "comm/membership/peer_exit.h"
#include "comm/shm/notice.h"

namespace shoal::board_test {
namespace {

using Clock = std::chrono::steady_clock;

bool is_whole(const shm::Notice::Words& words) {
  return std::all_of(words.begin(), words.end(), [&](uint64_t word) { return word == words[0]; });
}

// A child that does `work` until it is killed.
template <class Work>
pid_t start(const Work& work) {
  const pid_t child = fork();
  if (child == 0) {
    work();
    std::_Exit(0);
  }
  return child;
}

void end(pid_t child) {
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
}

TEST(Board, ELA01_a_notice_is_read_whole_while_it_is_written_and_after_its_writer_was_killed) {
  auto* memory = mmap(nullptr, sizeof(shm::Notice), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  auto* notice = static_cast<shm::Notice*>(memory);
  uint64_t last = 0;
  for (int trial = 0; trial < 100; ++trial) {
    const pid_t writer = start([&] {
      for (uint64_t number = last + 1;; ++number) {
        shm::Notice::Words words;
        words.fill(number);
        notice->write(words);
      }
    });
    const auto deadline = Clock::now() + std::chrono::microseconds(300 + 37 * trial);
    while (Clock::now() < deadline) {
      const auto words = notice->read();
      ASSERT_TRUE(is_whole(words));
      ASSERT_GE(words[0], last);
      last = words[0];
    }
    end(writer);
    const auto words = notice->read();
    ASSERT_TRUE(is_whole(words)) << "trial " << trial;
    last = words[0];
  }
  EXPECT_GT(last, 1000U);
  munmap(memory, sizeof(shm::Notice));
}

TEST(Board, ELA01_the_end_of_a_process_is_noticed_at_once) {
  const pid_t first = start([] { pause(); });
  const pid_t second = start([] { pause(); });
  std::atomic<int> noticed = 0;
  PeerExit exits({process_of(first), process_of(second)}, [&] { ++noticed; });
  EXPECT_FALSE(exits.gone(0));
  const auto killed = Clock::now();
  kill(first, SIGKILL);  // not reaped yet
  while (noticed == 0 && Clock::now() - killed < std::chrono::seconds(2)) std::this_thread::yield();
  EXPECT_TRUE(exits.gone(0));
  EXPECT_FALSE(exits.gone(1));
  EXPECT_LT(Clock::now() - killed, std::chrono::milliseconds(90)) << "/proc is read every 100 ms";
  waitpid(first, nullptr, 0);
  end(second);
  while (noticed == 1 && Clock::now() - killed < std::chrono::seconds(2)) std::this_thread::yield();
  EXPECT_TRUE(exits.gone(1));
}

}  // namespace
}  // namespace shoal::board_test
