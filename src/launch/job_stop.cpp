// Signals that stop, end or suspend a job from outside, and how its ranks end then.

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "launch/job.h"

namespace shoal {
namespace {

pid_t parent_of(pid_t process) {
  std::ifstream file(fmt::format("/proc/{}/stat", process));
  std::string line;
  std::getline(file, line);
  const auto name_end = line.rfind(')');  // then the state, and the parent
  return name_end == std::string::npos ? 0 : std::atoi(line.c_str() + std::min(name_end + 4, line.size()));
}

// Whether no shell could continue this process group: the system ignores SIGTSTP there. A batch system that suspends a
// job sends it to all of its processes, the ranks among them.
bool is_orphaned() {
  for (pid_t process = getppid(); process > 0; process = parent_of(process)) {
    if (getpgid(process) != getpgrp()) return getsid(process) != getsid(0);
  }
  return true;
}

}  // namespace

void Job::note_interrupted_end(const Child& child, int status) {
  const bool well = interruption_.note_end(exit_code(status));
  if (well || interruption_.forced() || interruption_.after_failure()) return;
  output_.say("rank {} (pid {}), told to stop, {}", child.rank, child.pid, describe_end(status));
}

// The first interrupt lets the ranks end on their own, the next one kills them.
void Job::interrupt(const Signals::Asked& asked) {
  if (!interruption_.began()) return tell_to_stop();
  if (!interruption_.is_repeated_by(asked)) return;
  if (ranks_.alive() > 0 && !interruption_.forced()) output_.say("told to stop once more: the ranks are killed");
  interruption_.force();
  ranks_.signal_all(SIGKILL);
  waits_no_more_ = ranks_.alive() == 0;
}

void Job::tell_to_stop() {
  ranks_.signal_all(SIGINT);
  // A job that ends because of a failure ends no later, and not well.
  interruption_.begin(ranks_.go_on() ? std::nullopt : code_);
  stop_times_.give_at_most(options_.stop_seconds);
  waits_no_more_ = ranks_.alive() == 0;
}

// As a shell's job control wants it: the ranks have groups of their own, which the terminal does not reach. They are
// continued in the order in which they were stopped, so that none of them sees another one stopped for the whole time.
void Job::suspend() {
  if (is_orphaned()) return;
  const auto groups = ranks_.stop();
  signals_.suspend();
  for (const pid_t group : groups) kill(-group, SIGCONT);
}

// Without one, SIGPIPE would end a program; the ranks may save. Who has SIGPIPE ignored (as services of systemd do)
// wants to go on.
void Job::look_for_reader() {
  struct sigaction pipe {};
  if (sigaction(SIGPIPE, nullptr, &pipe) == 0 && pipe.sa_handler == SIG_IGN) return;
  const bool forwards = options_.prefix_output;  // otherwise the ranks have the streams themselves, and look after them
  if (!forwards || output_.error() != EPIPE || interruption_.began() || ranks_.alive() == 0) return;
  unread_ = true;
  output_.say("nobody reads the output any more: the ranks are told to stop");
  tell_to_stop();
}

// Ranks that have had their time.
void Job::end_late() {
  const int signal = stop_times_.due();
  if (signal == 0) return;
  if (interruption_.began() && !interruption_.forced()) {
    std::vector<int> late;
    for (const auto& child : ranks_.children()) {
      if (child.running) late.push_back(child.rank);
    }
    if (!late.empty() && !interruption_.after_failure()) {
      output_.say("{:g} s after they were told to stop, these ranks are killed: {}", options_.stop_seconds,
                  fmt::join(late, ", "));
    }
    interruption_.force();
  }
  ranks_.signal_all(signal);
}

}  // namespace shoal
