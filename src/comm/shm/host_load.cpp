#include "comm/shm/host_load.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>

#include "base/processors.h"

namespace shoal::shm {
namespace {

// A process that may use some of the cores alone cannot tell who else wants these.
bool may_use_all_cores() {
  return processors() >= sysconf(_SC_NPROCESSORS_ONLN);
}

bool is_busy() {
  if (!may_use_all_cores()) return false;
  const int fd = open("/proc/loadavg", O_RDONLY | O_CLOEXEC);
  if (fd < 0) return false;
  std::array<char, 128> text{};
  const auto size = read(fd, text.data(), text.size());
  close(fd);
  if (size <= 0) return false;
  const auto threads = runnable_threads({text.data(), static_cast<size_t>(size)});
  return threads && *threads > sysconf(_SC_NPROCESSORS_ONLN);
}

}  // namespace

std::optional<int> runnable_threads(std::string_view loadavg) {
  for (int field = 0; field < 3; ++field) {
    const auto end = loadavg.find(' ');
    if (end == std::string_view::npos) return std::nullopt;
    loadavg.remove_prefix(end + 1);
  }
  int threads = 0;
  const auto [end, error] = std::from_chars(loadavg.data(), loadavg.data() + loadavg.size(), threads);
  if (error != std::errc() || end == loadavg.data() + loadavg.size() || *end != '/') return std::nullopt;
  return threads;
}

bool HostLoad::crowded(Clock::time_point now) {
  auto next = next_look_.load(std::memory_order_relaxed);
  const auto count = now.time_since_epoch().count();
  if (count >= next && next_look_.compare_exchange_strong(next, (now + interval).time_since_epoch().count(),
                                                          std::memory_order_relaxed)) {
    busy_looks_.store(is_busy() ? std::min(2, busy_looks_.load(std::memory_order_relaxed) + 1) : 0,
                      std::memory_order_relaxed);
  }
  return busy_looks_.load(std::memory_order_relaxed) == 2;
}

}  // namespace shoal::shm
