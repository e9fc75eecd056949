#include "base/without_sigpipe.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <stdexcept>
#include <thread>

namespace shoal {
namespace {

// A pipe that nobody reads.
class BrokenPipe {
 public:
  BrokenPipe() {
    if (pipe(ends_.data()) != 0) throw std::runtime_error("no pipe");
    close(ends_[0]);
  }
  ~BrokenPipe() { close(ends_[1]); }
  int error_of_write() const { return write(ends_[1], "x", 1) < 0 ? errno : 0; }

 private:
  std::array<int, 2> ends_{};
};

bool is_blocked() {
  sigset_t now;
  pthread_sigmask(SIG_BLOCK, nullptr, &now);
  return sigismember(&now, SIGPIPE) == 1;
}

TEST(WithoutSigpipe, a_write_to_a_closed_connection_fails_and_ends_nobody) {
  const BrokenPipe pipe;
  for (int time = 0; time < 2; ++time) {
    const WithoutSigpipe guard;
    EXPECT_EQ(pipe.error_of_write(), EPIPE);
  }
  EXPECT_FALSE(is_blocked());
}

TEST(WithoutSigpipe, threads_that_are_started_meanwhile_stay_without_it) {
  const BrokenPipe pipe;
  int error = 0;
  std::thread thread;
  {
    const WithoutSigpipe guard;
    thread = std::thread([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      error = pipe.error_of_write();
    });
  }
  thread.join();
  EXPECT_EQ(error, EPIPE);
}

TEST(WithoutSigpipe, a_process_that_wants_the_signal_still_gets_it) {
  EXPECT_EXIT(BrokenPipe().error_of_write(), testing::KilledBySignal(SIGPIPE), "");
  const auto within = [] {
    { const WithoutSigpipe guard; }
    BrokenPipe().error_of_write();
  };
  EXPECT_EXIT(within(), testing::KilledBySignal(SIGPIPE), "");
}

}  // namespace
}  // namespace shoal
