#include "comm/tcp/poller.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <system_error>

namespace shoal::tcp {
namespace {

constexpr uint64_t waking = UINT64_MAX;

[[noreturn]] void fail(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

}  // namespace

Poller::Poller(const std::vector<const Descriptor*>& sockets)
    : sockets_(sockets),
      watched_(sockets.size()),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      wake_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (!epoll_.open()) fail("epoll_create1");
  if (!wake_.open()) fail("eventfd");
  epoll_event event{.events = EPOLLIN, .data = {.u64 = waking}};
  if (epoll_ctl(epoll_.number(), EPOLL_CTL_ADD, wake_.number(), &event) != 0) fail("epoll_ctl");
}

// A broken socket has events whatever is asked for, so that one of which nothing is asked is left out.
void Poller::watch(size_t which, bool input, bool output) {
  const unsigned wanted = (input ? EPOLLIN : 0U) | (output ? EPOLLOUT : 0U);
  auto& watched = watched_[which];
  if (wanted == watched) return;
  epoll_event event{.events = wanted, .data = {.u64 = which}};
  const int how = watched == 0 ? EPOLL_CTL_ADD : wanted == 0 ? EPOLL_CTL_DEL : EPOLL_CTL_MOD;
  if (epoll_ctl(epoll_.number(), how, sockets_[which]->number(), &event) != 0) fail("epoll_ctl");
  watched = wanted;
}

std::vector<size_t> Poller::wait(std::chrono::milliseconds limit) const {
  epoll_event events[64];
  const int count = epoll_wait(epoll_.number(), events, 64, static_cast<int>(limit.count()));
  if (count < 0 && errno != EINTR) fail("epoll_wait");
  std::vector<size_t> places;
  for (int i = 0; i < count; ++i) {
    uint64_t rung = 0;
    if (events[i].data.u64 != waking) {
      places.push_back(events[i].data.u64);
    } else if (read(wake_.number(), &rung, sizeof rung) < 0 && !came_too_early()) {
      fail("read");
    }
  }
  return places;
}

void Poller::wake() const {
  const uint64_t one = 1;
  [[maybe_unused]] const auto written = write(wake_.number(), &one, sizeof one);
}

}  // namespace shoal::tcp
