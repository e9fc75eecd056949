// Preloaded into a program whose libraries take long to load (tests/support/warm_program.h): the process loads them,
// stops before main(), and forks a copy of itself for each request. The copy goes on with main(), with the arguments,
// variables and output of the request.

#include <dlfcn.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdlib>
#include <cstring>

#include "tests/support/warm_program.h"

namespace shoal::test {
namespace {

// Like fork(), but the child is one of our parent's, which waits for it as for any process that it starts. The C
// library finds the child's number where it keeps that of its thread.
pid_t fork_sibling() {
  int* number = nullptr;
  if (prctl(PR_GET_TID_ADDRESS, &number) != 0) return -1;
  constexpr unsigned long flags = CLONE_PARENT | CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID | SIGCHLD;
#if defined(__x86_64__)
  return static_cast<pid_t>(syscall(SYS_clone, flags, nullptr, nullptr, number, nullptr));
#else
  return static_cast<pid_t>(syscall(SYS_clone, flags, nullptr, nullptr, nullptr, number));
#endif
}

// Reads a request into `text`; its size, 0 at the end of the test. output: where the program writes.
size_t receive(int requests, std::array<char, most_request_bytes>& text, int& output) {
  MessageWithDescriptor message(text.data(), text.size());
  const auto size = recvmsg(requests, &message.header, MSG_CMSG_CLOEXEC);
  const auto* rights = CMSG_FIRSTHDR(&message.header);
  if (size <= 0 || rights == nullptr) return 0;
  std::memcpy(&output, CMSG_DATA(rights), sizeof output);
  return static_cast<size_t>(size);
}

// Arguments and variables as the system gives them to a program: pointers, with a null behind either list.
char** lists_of(char* text, size_t size) {
  static std::array<char*, most_request_bytes / 2> words;
  size_t count = 0;
  for (char* end = text + size; text < end; text += std::strlen(text) + 1) {
    words[count++] = std::strcmp(text, end_of_list) == 0 ? nullptr : text;
  }
  return words.data();
}

// Returns in each copy: its arguments, with its variables behind them.
char** serve(int requests) {
  static std::array<char, most_request_bytes> text;
  for (int output = -1;;) {
    const auto size = receive(requests, text, output);
    if (size == 0) _exit(0);
    const auto child = fork_sibling();
    if (child == 0) {
      dup2(output, STDOUT_FILENO);
      dup2(output, STDERR_FILENO);
      close(output);
      close(requests);
      return lists_of(text.data(), size);
    }
    close(output);
    if (write(requests, &child, sizeof child) != sizeof child) _exit(1);
  }
}

}  // namespace
}  // namespace shoal::test

// The C library calls it once all libraries are loaded, and before what the program itself initializes.
extern "C" int __libc_start_main(int (*main)(int, char**, char**), int count, char** arguments, void (*init)(),
                                 void (*fini)(), void (*end_of_loader)(), void* end_of_stack) {
  if (const auto* requests = std::getenv(shoal::test::warm_requests)) {
    arguments = shoal::test::serve(std::atoi(requests));
    for (count = 0; arguments[count] != nullptr;) ++count;
    environ = arguments + count + 1;
    const auto* slash = std::strrchr(arguments[0], '/');
    prctl(PR_SET_NAME, slash != nullptr ? slash + 1 : arguments[0]);
  }
  const auto start = reinterpret_cast<decltype(&__libc_start_main)>(dlsym(RTLD_NEXT, "__libc_start_main"));
  return start(main, count, arguments, init, fini, end_of_loader, end_of_stack);
}
