#pragma once
// A program that a test starts often, each time from a copy of a process that has loaded its libraries: to load
// libtorch takes 0.2 s of processor time, which is most of what many commands take.

#include <sys/socket.h>
#include <sys/types.h>

#include <array>
#include <optional>
#include <string>
#include <vector>

namespace shoal::test {

// Between a test and the program that it has warmed up: a request is the arguments, `end_of_list`, the variables and
// `end_of_list`, each with a null byte, and the descriptor of the output; the answer is the number of the process.
inline constexpr const char* warm_requests = "SHOAL_TEST_WARM_REQUESTS";  // the descriptor of the requests
inline constexpr const char* end_of_list = "\n";
inline constexpr size_t most_request_bytes = 1 << 16;

// A message with room for one descriptor beside its text, as the system wants it.
struct MessageWithDescriptor {
  MessageWithDescriptor(char* text, size_t size) : data{text, size} {
    header.msg_iov = &data;
    header.msg_iovlen = 1;
    header.msg_control = control.data();
    header.msg_controllen = control.size();
  }
  MessageWithDescriptor(const MessageWithDescriptor&) = delete;
  MessageWithDescriptor& operator=(const MessageWithDescriptor&) = delete;

  iovec data;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr header{};
};

// Starts `program` in this way from now on. library: what is preloaded for it (warm_start.cpp).
void warm_up(const std::string& program, const std::string& library);

// The process, which is a child of this one. Nothing if it must be started as usual: another program, or not in the
// folder and with the variables (NAME=VALUE each) of the first start, but for those that libraries do not read when
// they are loaded: SHOAL_* and a launcher's.
std::optional<pid_t> start_warm(const std::vector<std::string>& arguments, const std::vector<std::string>& variables,
                                int output);

}  // namespace shoal::test
