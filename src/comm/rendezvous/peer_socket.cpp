#include "comm/rendezvous/peer_socket.h"

#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>

#include <stdexcept>

namespace shoal {

Descriptor listen_for_peers(const std::string& address) {
  return listen_on(resolve(address, 0), SOCK_STREAM | SOCK_NONBLOCK);
}

std::string place_of(const Descriptor& socket) {
  const auto address = own_address(socket);
  return fmt::format("{}:{}", address.host(), address.port());
}

Descriptor connect_to(const std::string& place) {
  const auto colon = place.rfind(':');
  const auto address = resolve(place.substr(0, colon), std::stoi(place.substr(colon + 1)));
  auto connecting = make_socket(address, SOCK_STREAM | SOCK_NONBLOCK);
  prepare(connecting);
  if (!connect_to(connecting, address) && !came_too_early()) throw std::runtime_error("cannot connect to " + place);
  return connecting;
}

void prepare(const Descriptor& socket) {
  const auto set = [&](int level, int name, int value) {
    setsockopt(socket.number(), level, name, &value, sizeof value);
  };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, 5);
  set(IPPROTO_TCP, TCP_KEEPINTVL, 1);
  set(IPPROTO_TCP, TCP_KEEPCNT, 10);
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, 15000);
  set(IPPROTO_TCP, TCP_NOTSENT_LOWAT, 256 << 10);  // bounds the data that wait in the kernel
}

HostWatch::HostWatch(const Descriptor& socket) {
  const int none = 0;
  setsockopt(socket.number(), IPPROTO_TCP, TCP_USER_TIMEOUT, &none, sizeof none);
}

bool HostWatch::silent(const Descriptor& socket, std::chrono::seconds limit) {
  constexpr int most_probes = 2;  // of a peer that takes no data; one may be on its way, or lost
  tcp_info info{};
  socklen_t size = sizeof info;
  if (getsockopt(socket.number(), IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return false;
  const auto now = std::chrono::steady_clock::now();
  const std::chrono::milliseconds since_answer(info.tcpi_last_ack_recv);
  const bool asked = info.tcpi_unacked > 0 || info.tcpi_probes > most_probes;
  if (!asked || since_answer < now - answered_) answered_ = now;
  return now - answered_ > limit;
}

}  // namespace shoal
