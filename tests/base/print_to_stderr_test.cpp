#include "base/print_to_stderr.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <csignal>

namespace shoal {
namespace {

// Ends with 0, if the process goes on after a message to standard error, which is this file.
[[noreturn]] void tell(int file) {
  std::signal(SIGPIPE, SIG_DFL);
  dup2(file, STDERR_FILENO);
  print_to_stderr("step {}: {}\n", 1, "a message");
  _exit(0);
}

TEST(PrintToStderr, a_message_that_cannot_be_written_ends_nothing) {
  EXPECT_EXIT(tell(open("/dev/full", O_WRONLY)), testing::ExitedWithCode(0), "") << "a full disk";
  std::array<int, 2> ends{};
  ASSERT_EQ(pipe(ends.data()), 0);
  close(ends[0]);
  EXPECT_EXIT(tell(ends[1]), testing::ExitedWithCode(0), "") << "a pipe that nobody reads";
  close(ends[1]);
}

TEST(PrintToStderr, a_message_is_written) {
  testing::internal::CaptureStderr();
  print_to_stderr("step {}: {}\n", 1, "a message");
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "step 1: a message\n");
}

}  // namespace
}  // namespace shoal
