#include "launch/child.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "base/end_process.h"
#include "base/print_to_stderr.h"
#include "shoal/error.h"

namespace shoal {
namespace {

struct Pipe {
  int read = -1;
  int write = -1;
};

Pipe make_pipe() {
  int fds[2];
  if (pipe2(fds, O_CLOEXEC) != 0) throw UsageError(fmt::format("cannot make a pipe: {}", std::strerror(errno)));
  return {fds[0], fds[1]};
}

// Environment for execvpe: ours, with `variables` added or replaced.
std::vector<std::string> merged_environment(const Variables& variables) {
  std::vector<std::string> merged;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text(*entry);
    const auto name = text.substr(0, text.find('='));
    bool replaced = false;
    for (const auto& variable : variables) replaced = replaced || variable.first == name;
    if (!replaced) merged.push_back(text);
  }
  for (const auto& [name, value] : variables) merged.push_back(name + "=" + value);
  return merged;
}

std::vector<char*> pointers(std::vector<std::string>& strings) {
  std::vector<char*> list;
  for (auto& string : strings) list.push_back(string.data());
  list.push_back(nullptr);
  return list;
}

// Runs the body in the child, where the launcher's open files and signal handlers are of no use.
[[noreturn]] void run_body(int rank, const std::function<int()>& body, const Variables& variables) {
  prctl(PR_SET_NAME, fmt::format("shoal-rank-{}", rank).c_str());
  close_range(STDERR_FILENO + 1, ~0U, 0);
  for (int number = 1; number < NSIG; ++number) {
    struct sigaction action {};
    if (sigaction(number, nullptr, &action) == 0 && action.sa_handler != SIG_IGN) signal(number, SIG_DFL);
  }
  for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), /*replace=*/1);
  int code = 1;
  try {
    code = body();
  } catch (const std::exception& error) {
    print_to_stderr("error: {}\n", error.what());
  }
  end_process(code);
}

}  // namespace

Child start_child(int rank, const RankProgram& program, const Variables& variables, const Outlets& outlets) {
  const bool prefix = outlets.out != nullptr;
  auto arguments = program.command;
  auto environment = merged_environment(variables);
  const auto argv = pointers(arguments);
  const auto envp = pointers(environment);
  const Pipe out = prefix ? make_pipe() : Pipe{};
  const Pipe err = prefix ? make_pipe() : Pipe{};
  const Pipe failure = make_pipe();  // reports errno if exec fails; a successful exec closes it
  const pid_t parent = getpid();
  if (program.body) std::fflush(nullptr);  // or the child would write it once more
  const pid_t pid = fork();
  if (pid == 0) {
    // Only async-signal-safe calls up to exec: other threads may hold locks.
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);  // the launcher died before the line above
    setpgid(0, 0);
    // Restores defaults: a shell's background jobs ignore SIGINT, and this program ignores SIGXFSZ.
    for (const int ignored : {SIGINT, SIGTERM, SIGXFSZ}) signal(ignored, SIG_DFL);
    // Ranks are not in the terminal's foreground group. With these signals ignored, reading the terminal fails and
    // writing works; otherwise both could stop the rank.
    for (const int stops : {SIGTTIN, SIGTTOU}) signal(stops, SIG_IGN);
    if (isatty(STDIN_FILENO) == 1) dup2(open("/dev/null", O_RDONLY), STDIN_FILENO);
    if (prefix) {
      dup2(out.write, STDOUT_FILENO);
      dup2(err.write, STDERR_FILENO);
    }
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, nullptr);
    if (program.body) run_body(rank, program.body, variables);
    execvpe(argv[0], argv.data(), envp.data());
    const int error = errno;
    (void)!write(failure.write, &error, sizeof error);
    _exit(127);
  }
  if (pid > 0) setpgid(pid, pid);  // in both processes, because either may be first
  close(failure.write);
  if (prefix) {
    close(out.write);
    close(err.write);
  }
  int error = pid < 0 ? errno : 0;
  const bool failed = pid < 0 || read(failure.read, &error, sizeof error) == sizeof error;
  close(failure.read);
  Child child{.rank = rank, .pid = pid, .running = true};
  if (prefix) {
    const auto text = fmt::format("[{}] ", rank);
    child.pipes.emplace_back(out.read, *outlets.out, text);
    child.pipes.emplace_back(err.read, *outlets.err, text);
  }
  if (failed) {
    if (pid > 0) waitpid(pid, nullptr, 0);
    throw UsageError(
        fmt::format("cannot start '{}': {}", program.body ? "a rank" : program.command.front(), std::strerror(error)));
  }
  return child;
}

std::string in_words(int signal) {
  const char* name = sigabbrev_np(signal);
  return fmt::format("signal {} (SIG{})", signal, name != nullptr ? name : "?");
}

std::string describe_end(int status) {
  if (WIFEXITED(status)) return fmt::format("ended with exit code {}", WEXITSTATUS(status));
  return fmt::format("was killed by {}", in_words(WTERMSIG(status)));
}

int exit_code(int status) {
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace shoal
