#pragma once
// Real processes, started with their output captured.

#include <sys/resource.h>

#include <string>
#include <utility>
#include <vector>

namespace shoal::test {

struct Command {
  std::vector<std::string> arguments;
  std::vector<std::pair<std::string, std::string>> variables;  // added to our environment without launch variables
};

// Processor time of the processes that have been run so far, which other work on the machine does not change much.
inline double children_seconds() {
  rusage usage{};
  getrusage(RUSAGE_CHILDREN, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

struct Ended {
  int code = -1;         // exit code, 128 + number for a signal
  std::string output;    // standard output and error
  double seconds = 0;    // from the common start to this process's end
  bool overdue = false;  // killed by us at the time limit
};

// Parses "NAME=VALUE NAME=VALUE", for Command.
std::vector<std::pair<std::string, std::string>> variables_of(const std::string& words);

// Starts all commands at once and waits for all. A stopped process counts as overdue; at the limit it is killed.
std::vector<Ended> run_together(const std::vector<Command>& commands, double limit_seconds);
Ended run(const std::vector<std::string>& arguments, double limit_seconds);

// A port of loopback that was free a moment ago.
int free_port();

}  // namespace shoal::test
