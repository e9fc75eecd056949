#include "base/start_thread.h"

#include <gtest/gtest.h>
#include <pthread.h>

#include <string>

namespace shoal {
namespace {

// Threads that begin in its scope need more memory than a process can address, so that none does.
class NoMoreThreads {
 public:
  NoMoreThreads() {
    pthread_getattr_default_np(&before_);
    pthread_attr_t huge;
    pthread_attr_init(&huge);
    pthread_attr_setstacksize(&huge, size_t{1} << 48);
    pthread_setattr_default_np(&huge);
    pthread_attr_destroy(&huge);
  }
  ~NoMoreThreads() {
    pthread_setattr_default_np(&before_);
    pthread_attr_destroy(&before_);
  }
  NoMoreThreads(const NoMoreThreads&) = delete;
  NoMoreThreads& operator=(const NoMoreThreads&) = delete;

 private:
  pthread_attr_t before_{};
};

TEST(StartThread, runs_the_work) {
  int done = 0;
  start_thread("counts", [&] { ++done; }).join();
  EXPECT_EQ(done, 1);
}

TEST(StartThread, says_which_thread_the_system_refuses_and_why) {
  const NoMoreThreads scope;
  try {
    start_thread("counts", [] {}).join();
    FAIL() << "a thread of 256 TiB was started";
  } catch (const UsageError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("cannot start a thread that counts: "), std::string::npos) << text;
    EXPECT_NE(text.find("ulimit -u, pids.max"), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace shoal
