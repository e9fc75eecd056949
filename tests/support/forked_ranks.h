#pragma once
// Ranks forked from a test, which has loaded everything but joined nothing, so that hundreds of starts take seconds.

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "shoal/world.h"
#include "tests/support/processes.h"

namespace shoal::test {

struct RankEnded {
  int status = 0;    // as returned by wait()
  std::string text;  // result of the body, or "error: " and its exception's text
  std::chrono::steady_clock::time_point at{};
};

// Runs `body` on `size` ranks. `meanwhile` runs in the parent, and may start further ranks. chosen: options of the
// world; rank, size, address and timeouts are set here.
inline std::vector<RankEnded> run_ranks(int size, const std::function<std::string(const World&)>& body,
                                        const std::function<void(const std::vector<pid_t>&)>& meanwhile = {},
                                        const WorldOptions& chosen = {}) {
  const int port = free_port();
  std::vector<pid_t> pids;
  std::vector<int> pipes;
  for (int rank = 0; rank < size; ++rank) {
    int ends[2];
    if (pipe(ends) != 0) std::abort();
    const pid_t pid = fork();
    if (pid == 0) {
      std::string text;
      try {
        at::set_num_threads(1);
        WorldOptions options = chosen;
        options.rank = rank;
        options.size = size;
        options.address = "127.0.0.1";
        options.port = port;
        options.timeout_seconds = 60;
        options.rendezvous_timeout_seconds = 60;
        text = body(init(options));
      } catch (const std::exception& error) {
        text = fmt::format("error: {}", error.what());
      }
      [[maybe_unused]] const auto written = ::write(ends[1], text.data(), text.size());
      std::_Exit(0);
    }
    close(ends[1]);
    pids.push_back(pid);
    pipes.push_back(ends[0]);
  }
  if (meanwhile) meanwhile(pids);
  std::vector<RankEnded> ended(size);
  std::vector<bool> over(size);
  while (!std::all_of(over.begin(), over.end(), [](bool one) { return one; })) {
    for (int rank = 0; rank < size; ++rank) {
      if (over[rank] || waitpid(pids[rank], &ended[rank].status, WNOHANG) != pids[rank]) continue;
      over[rank] = true;
      ended[rank].at = std::chrono::steady_clock::now();
    }
    usleep(1000);
  }
  for (int rank = 0; rank < size; ++rank) {
    char buffer[4096];
    const auto length = read(pipes[rank], buffer, sizeof buffer);
    ended[rank].text.assign(buffer, std::max<ssize_t>(0, length));
    close(pipes[rank]);
  }
  return ended;
}

}  // namespace shoal::test
