#pragma once
// Runs real processes and keeps what they print.

#include <string>
#include <utility>
#include <vector>

namespace shoal::test {

struct Command {
  std::vector<std::string> arguments;
  std::vector<std::pair<std::string, std::string>> variables;  // on top of our environment without launch variables
};

struct Ended {
  int code = -1;         // exit code, 128 + number for a signal
  std::string output;    // standard output and error
  double seconds = 0;    // from the common start to this one's end
  bool overdue = false;  // killed by us at the limit
};

// For Command, from "NAME=VALUE NAME=VALUE".
std::vector<std::pair<std::string, std::string>> variables_of(const std::string& words);

// Starts all commands at once and waits for all. One that is stopped counts as overdue; at the limit it is killed.
std::vector<Ended> run_together(const std::vector<Command>& commands, double limit_seconds);
Ended run(const std::vector<std::string>& arguments, double limit_seconds);

// A port of loopback that was free a moment ago.
int free_port();

}  // namespace shoal::test
