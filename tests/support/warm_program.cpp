#include "tests/support/warm_program.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <memory>
#include <utility>

#include "tests/support/pointers.h"

namespace shoal::test {
namespace {

using Words = std::vector<std::string>;

// Beginnings of variables that differ from rank to rank and from job to job.
constexpr std::array later{"SHOAL_", "RANK=", "WORLD_SIZE=", "MASTER_ADDR=", "MASTER_PORT="};

// What libraries may read when they are loaded.
Words surroundings(const Words& variables) {
  Words read{std::filesystem::current_path()};
  std::copy_if(variables.begin(), variables.end(), std::back_inserter(read), [](const std::string& each) {
    return std::none_of(later.begin(), later.end(), [&](const char* name) { return each.rfind(name, 0) == 0; });
  });
  std::sort(read.begin(), read.end());
  return read;
}

class WarmProgram {
 public:
  WarmProgram(std::string program, std::string library) : program_(std::move(program)), library_(std::move(library)) {}

  std::optional<pid_t> start(const Words& arguments, const Words& variables, int output) {
    if (arguments.front() != program_) return std::nullopt;
    auto around = surroundings(variables);
    if (requests_ < 0) load(variables);
    if (requests_ < 0 || around != surroundings_) return std::nullopt;
    std::string text;
    for (const auto* list : {&arguments, &variables}) {
      for (const auto& word : *list) text.append(word.c_str(), word.size() + 1);
      text.append(end_of_list, std::strlen(end_of_list) + 1);
    }
    pid_t process = -1;
    if (text.size() > most_request_bytes || !send(text, output)) return std::nullopt;
    if (read(requests_, &process, sizeof process) != sizeof process || process < 0) return std::nullopt;
    return process;
  }

 private:
  void load(Words variables) {
    surroundings_ = surroundings(variables);
    std::array<int, 2> ends{};
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()) != 0) return;
    variables.push_back("LD_PRELOAD=" + library_);
    variables.push_back(std::string(warm_requests) + "=" + std::to_string(ends[1]));
    const auto environment = pointers_to(variables);
    const Words line{program_};
    const auto arguments = pointers_to(line);
    if (fork() == 0) {
      fcntl(ends[1], F_SETFD, 0);
      execve(program_.c_str(), arguments.data(), environment.data());
      _exit(127);
    }
    close(ends[1]);
    requests_ = ends[0];
  }

  bool send(const std::string& text, int output) const {
    MessageWithDescriptor message(const_cast<char*>(text.data()), text.size());
    auto* rights = CMSG_FIRSTHDR(&message.header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof output);
    std::memcpy(CMSG_DATA(rights), &output, sizeof output);
    return sendmsg(requests_, &message.header, MSG_NOSIGNAL) == static_cast<ssize_t>(text.size());
  }

  std::string program_;
  std::string library_;
  Words surroundings_;
  int requests_ = -1;
};

std::unique_ptr<WarmProgram>& warm() {
  static std::unique_ptr<WarmProgram> program;
  return program;
}

}  // namespace

void warm_up(const std::string& program, const std::string& library) {
  warm() = std::make_unique<WarmProgram>(program, library);
}

std::optional<pid_t> start_warm(const Words& arguments, const Words& variables, int output) {
  return warm() ? warm()->start(arguments, variables, output) : std::nullopt;
}

}  // namespace shoal::test
