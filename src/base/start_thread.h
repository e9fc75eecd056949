#pragma once
// Start of the library's own threads.

#include <fmt/format.h>

#include <future>
#include <system_error>
#include <thread>
#include <utility>

#include "shoal/error.h"

namespace shoal {

[[noreturn]] inline void refuse_to_start(const char* purpose, const std::system_error& error) {
  throw UsageError(
      fmt::format("cannot start a thread that {}: {}; the limit of threads or of memory is reached: raise it "
                  "(ulimit -u, pids.max and memory.max of the cgroup), or start fewer ranks and threads",
                  purpose, error.code().message()));
}

// UsageError if the system starts no more threads. purpose: what the thread does, for the error.
template <class Work>
std::thread start_thread(const char* purpose, Work&& work) {
  try {
    return std::thread(std::forward<Work>(work));
  } catch (const std::system_error& error) {
    refuse_to_start(purpose, error);
  }
}

// The same for work whose end is waited for.
template <class Work>
auto start_async(const char* purpose, Work&& work) {
  try {
    return std::async(std::launch::async, std::forward<Work>(work));
  } catch (const std::system_error& error) {
    refuse_to_start(purpose, error);
  }
}

}  // namespace shoal
