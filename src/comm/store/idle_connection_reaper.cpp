#include "comm/store/idle_connection_reaper.h"

#include <fcntl.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/start_thread.h"
#include "comm/rendezvous/socket.h"
#include "shoal/detail/clock.h"

namespace shoal {
namespace {

constexpr std::chrono::seconds time_to_ask(10);
constexpr std::chrono::milliseconds between_rounds(1000);

void allow_more_files() {
  constexpr rlim_t enough = 16384;
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  const auto wanted = std::min(limit.rlim_max, enough);
  if (limit.rlim_cur >= wanted) return;
  limit.rlim_cur = wanted;
  setrlimit(RLIMIT_NOFILE, &limit);
}

std::vector<int> open_files() {
  std::vector<int> numbers;
  std::error_code error;
  for (std::filesystem::directory_iterator entry("/proc/self/fd", error), end; !error && entry != end;
       entry.increment(error)) {
    numbers.push_back(std::stoi(entry->path().filename().string()));
  }
  return numbers;
}

bool is_at(int port, int number) {
  SocketAddress own;
  own.length = sizeof own.storage;
  if (getsockname(number, reinterpret_cast<sockaddr*>(&own.storage), &own.length) != 0) return false;
  return (own.storage.ss_family == AF_INET || own.storage.ss_family == AF_INET6) && own.port() == port;
}

// The peer's address, as text, of a connection to our port that was never answered.
std::optional<std::string> unanswered(const Descriptor& socket, int port) {
  if (!socket.open() || !is_at(port, socket.number())) return std::nullopt;
  SocketAddress peer;
  peer.length = sizeof peer.storage;
  if (getpeername(socket.number(), reinterpret_cast<sockaddr*>(&peer.storage), &peer.length) != 0) return std::nullopt;
  tcp_info info{};
  socklen_t length = sizeof info;
  constexpr socklen_t needed = offsetof(tcp_info, tcpi_bytes_sent) + sizeof info.tcpi_bytes_sent;
  if (getsockopt(socket.number(), IPPROTO_TCP, TCP_INFO, &info, &length) != 0 || length < needed) return std::nullopt;
  if (info.tcpi_bytes_sent > 0) return std::nullopt;
  return peer.host() + " " + std::to_string(peer.port());
}

}  // namespace

IdleConnectionReaper::IdleConnectionReaper(int port) {
  allow_more_files();
  thread_ = start_thread("guards the store's port", [this, port] { run(port); });
}

IdleConnectionReaper::~IdleConnectionReaper() {
  ended_ = true;
  thread_.join();
}

void IdleConnectionReaper::run(int port) const {
  std::map<std::string, Clock::time_point> since;  // by peer address
  while (!ended_) {
    const auto now = Clock::now();
    std::map<std::string, Clock::time_point> still;
    for (const int number : open_files()) {
      if (!is_at(port, number)) continue;
      // A duplicate, so that the descriptor stays valid if the server closes its own meanwhile.
      const Descriptor socket(fcntl(number, F_DUPFD_CLOEXEC, 3));
      const auto peer = unanswered(socket, port);
      if (!peer) continue;
      const auto known = since.find(*peer);
      const auto came = known == since.end() ? now : known->second;
      if (now - came > time_to_ask) {
        shutdown(socket.number(), SHUT_RDWR);
      } else {
        still[*peer] = came;
      }
    }
    since = std::move(still);
    for (auto left = between_rounds; left.count() > 0 && !ended_; left -= std::chrono::milliseconds(50)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
  }
}

}  // namespace shoal
