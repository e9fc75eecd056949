#include "launch/signals.h"

#include <pthread.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <initializer_list>

namespace shoal {

Signals::Signals() {
  sigemptyset(&set_);
  // Inherited as ignored, the system would reap the ranks itself, and nobody would learn how they ended.
  struct sigaction by_default {};
  by_default.sa_handler = SIG_DFL;
  sigaction(SIGCHLD, &by_default, &child_before_);
  for (const int signal : {SIGINT, SIGTERM, SIGUSR1, SIGUSR2, SIGCHLD}) sigaddset(&set_, signal);
  for (const int signal : {SIGHUP, SIGTSTP}) {
    struct sigaction now {};
    const bool ignored = sigaction(signal, nullptr, &now) == 0 && now.sa_handler == SIG_IGN;
    if (!ignored) sigaddset(&set_, signal);
  }
  pthread_sigmask(SIG_BLOCK, &set_, &before_);
  fd_ = signalfd(-1, &set_, SFD_NONBLOCK | SFD_CLOEXEC);
}

Signals::~Signals() {
  close(fd_);
  pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  sigaction(SIGCHLD, &child_before_, nullptr);
}

Signals::Asked Signals::asked() {
  Asked asked;
  signalfd_siginfo info{};
  while (read(fd_, &info, sizeof info) == sizeof info) {
    asked.to_stop = asked.to_stop || info.ssi_signo == SIGINT || info.ssi_signo == SIGTERM;
    asked.hung_up = asked.hung_up || info.ssi_signo == SIGHUP;
    asked.to_suspend = asked.to_suspend || info.ssi_signo == SIGTSTP;
    asked.who_waits = asked.who_waits || info.ssi_signo == SIGUSR1;
    asked.more = asked.more || info.ssi_signo == SIGUSR2;
  }
  return asked;
}

void Signals::suspend() {
  sigset_t stop;
  sigemptyset(&stop);
  sigaddset(&stop, SIGTSTP);
  pthread_sigmask(SIG_UNBLOCK, &stop, nullptr);
  raise(SIGTSTP);
  pthread_sigmask(SIG_BLOCK, &stop, nullptr);
}

}  // namespace shoal
