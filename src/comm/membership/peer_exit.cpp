#include "comm/membership/peer_exit.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <system_error>

#include "base/start_thread.h"
#include "base/without_signals.h"

namespace shoal {
namespace {

constexpr int look_every_ms = 100;

Descriptor open_process(int pid) {
#ifdef SYS_pidfd_open
  return Descriptor(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
#else
  return {};
#endif
}

}  // namespace

PeerExit::PeerExit(const std::vector<ProcessId>& processes, std::function<void()> noticed)
    : watched_(processes.size()), noticed_(std::move(noticed)), stop_(eventfd(0, EFD_CLOEXEC)) {
  if (!stop_.open()) throw std::system_error(errno, std::generic_category(), "eventfd");
  for (size_t i = 0; i < processes.size(); ++i) {
    auto& one = watched_[i];
    one.process = processes[i];
    one.descriptor = open_process(processes[i].pid);
    // Another process may have its pid by now.
    one.gone = state_of(one.process) == ProcessState::gone;
  }
  const WithoutSignals in_the_thread;
  thread_ = start_thread("watches the other processes of this host", [this] { run(); });
}

PeerExit::~PeerExit() {
  const uint64_t one = 1;
  [[maybe_unused]] const auto written = write(stop_.number(), &one, sizeof one);
  thread_.join();
}

bool PeerExit::end(size_t index) {
  auto& one = watched_[index];
  if (one.gone || one.killed) return false;
#ifdef SYS_pidfd_send_signal
  if (one.descriptor.open()) {
    one.killed = syscall(SYS_pidfd_send_signal, one.descriptor.number(), SIGKILL, nullptr, 0) == 0;
    return one.killed;
  }
#endif
  // Another process may have its pid by now.
  one.killed = state_of(one.process) != ProcessState::gone && kill(one.process.pid, SIGKILL) == 0;
  return one.killed;
}

void PeerExit::run() {
  while (true) {
    std::vector<pollfd> waits = {{stop_.number(), POLLIN, 0}};
    std::vector<Watched*> waited;
    bool look = false;
    for (auto& one : watched_) {
      if (one.gone) continue;
      look = look || !one.descriptor.open();
      waits.push_back({one.descriptor.number(), POLLIN, 0});  // poll ignores a negative number
      waited.push_back(&one);
    }
    poll(waits.data(), waits.size(), look ? look_every_ms : -1);
    if (waits[0].revents != 0) return;
    bool changed = false;
    for (size_t i = 0; i < waited.size(); ++i) {
      auto& one = *waited[i];
      if (waits[i + 1].revents == 0 && one.descriptor.open()) continue;
      if (!one.descriptor.open() && state_of(one.process) != ProcessState::gone) continue;
      one.gone = true;
      changed = true;
    }
    if (changed) noticed_();
  }
}

}  // namespace shoal
