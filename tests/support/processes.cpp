#include "tests/support/processes.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <map>
#include <memory>
#include <random>
#include <sstream>
#include <stdexcept>

#include "tests/support/pointers.h"
#include "tests/support/warm_program.h"

namespace shoal::test {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// NAME=VALUE each. The test itself may run under a launcher, whose variables do not concern these ranks.
std::vector<std::string> variables_for(const Command& command) {
  std::map<std::string, std::string> values;
  for (char** each = environ; *each != nullptr; ++each) {
    const std::string variable = *each;
    const auto equals = variable.find('=');
    values[variable.substr(0, equals)] = variable.substr(std::min(equals, variable.size() - 1) + 1);
  }
  for (const auto* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
                           "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID",
                           "SHOAL_JOB_ID", "SHOAL_SECRET"}) {
    values.erase(name);
  }
  for (const auto& [name, value] : command.variables) values[name] = value;
  std::vector<std::string> variables;
  for (const auto& [name, value] : values) variables.push_back(name + "=" + value);
  return variables;
}

class Process {
 public:
  Process(const Command& command, Clock::time_point start) : start_(start) {
    int fds[2];
    if (pipe2(fds, O_CLOEXEC) != 0) throw std::runtime_error("pipe");
    const auto variables = variables_for(command);
    const auto warm = start_warm(command.arguments, variables, fds[1]);
    pid_ = warm ? *warm : start_cold(command.arguments, variables, fds[1]);
    close(fds[1]);
    fd_ = fds[0];
    fcntl(fd_, F_SETFL, O_NONBLOCK);
  }
  Process(Process&& other) = delete;
  ~Process() { close(fd_); }

  bool running() const { return result.code < 0; }

  void poll() {
    std::array<char, 4096> buffer;
    for (auto count = read(fd_, buffer.data(), buffer.size()); count > 0;
         count = read(fd_, buffer.data(), buffer.size())) {
      result.output.append(buffer.data(), static_cast<size_t>(count));
    }
    int status = 0;
    if (!running() || waitpid(pid_, &status, WNOHANG) != pid_) return;
    result.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    result.seconds = seconds_since(start_);
    poll();  // reads its last output
  }

  void end() {
    result.overdue = true;
    kill(pid_, SIGKILL);
  }

  Ended result;

 private:
  static pid_t start_cold(const std::vector<std::string>& arguments, const std::vector<std::string>& variables,
                          int output) {
    const auto argv = pointers_to(arguments);
    const auto environment = pointers_to(variables);
    const auto pid = fork();
    if (pid != 0) return pid;
    dup2(output, STDOUT_FILENO);
    dup2(output, STDERR_FILENO);
    execvpe(argv[0], argv.data(), environment.data());
    _exit(127);
  }

  Clock::time_point start_;
  pid_t pid_ = -1;
  int fd_ = -1;
};

}  // namespace

std::vector<std::pair<std::string, std::string>> variables_of(const std::string& words) {
  std::vector<std::pair<std::string, std::string>> list;
  std::istringstream in(words);
  for (std::string word; in >> word;) {
    const auto equals = word.find('=');
    list.emplace_back(word.substr(0, equals), word.substr(equals + 1));
  }
  return list;
}

std::vector<Ended> run_together(const std::vector<Command>& commands, double limit_seconds) {
  const auto start = Clock::now();
  std::vector<std::unique_ptr<Process>> processes;
  for (const auto& command : commands) processes.push_back(std::make_unique<Process>(command, start));
  bool running = true;
  while (running) {
    running = false;
    for (auto& process : processes) {
      process->poll();
      if (process->running() && seconds_since(start) > limit_seconds) process->end();
      running = running || process->running();
    }
    usleep(5000);
  }
  std::vector<Ended> results;
  for (auto& process : processes) results.push_back(process->result);
  return results;
}

Ended run(const std::vector<std::string>& arguments, double limit_seconds) {
  return run_together({{arguments, {}}}, limit_seconds).front();
}

// Below the ports that the system gives to outgoing connections: one of another test's would take it before it is used.
int free_port() {
  std::random_device random;
  std::uniform_int_distribution<int> ports(10000, 32000);
  while (true) {
    const int port = ports(random);
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<uint16_t>(port));
    const bool is_free = bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
    close(fd);
    if (is_free) return port;
  }
}

}  // namespace shoal::test
