#include "comm/gossip/connection.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <stdexcept>

namespace shoal {
namespace {

[[noreturn]] void fail(const std::string& what) {
  throw std::runtime_error(fmt::format("{}: {}", what, std::strerror(errno)));
}

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

Addresses resolve(const std::string& host, const std::string& port, int flags) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(host.c_str(), port.c_str(), &hints, &found);
  if (error != 0) throw std::runtime_error(fmt::format("{}:{}: {}", host, port, gai_strerror(error)));
  return {found, freeaddrinfo};
}

Descriptor make_socket(const addrinfo& address) {
  Descriptor made(socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!made.open()) fail("socket");
  return made;
}

bool later() {
  return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINPROGRESS || errno == ENOTCONN || errno == EINTR;
}

}  // namespace

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  if (open()) close(number_);
  number_ = std::exchange(other.number_, -1);
  return *this;
}

Descriptor::~Descriptor() {
  if (open()) close(number_);
}

Descriptor listen_on(const std::string& address) {
  const auto resolved = resolve(address, "0", AI_PASSIVE);
  auto listening = make_socket(*resolved);
  if (bind(listening.number(), resolved->ai_addr, resolved->ai_addrlen) != 0) fail("bind to " + address);
  if (listen(listening.number(), SOMAXCONN) != 0) fail("listen on " + address);
  return listening;
}

std::string place_of(const Descriptor& socket) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  char host[NI_MAXHOST];
  char port[NI_MAXSERV];
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  if (getsockname(socket.number(), generic, &length) != 0) fail("getsockname");
  const int error = getnameinfo(generic, length, host, sizeof host, port, sizeof port, NI_NUMERICHOST | NI_NUMERICSERV);
  if (error != 0) throw std::runtime_error(gai_strerror(error));
  return fmt::format("{}:{}", host, port);
}

Descriptor connect_to(const std::string& place) {
  const auto colon = place.rfind(':');
  const auto resolved = resolve(place.substr(0, colon), place.substr(colon + 1), 0);
  auto connecting = make_socket(*resolved);
  prepare(connecting);
  if (connect(connecting.number(), resolved->ai_addr, resolved->ai_addrlen) != 0 && !later()) fail("connect " + place);
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
}

void OutgoingConnection::put(const Frame& frame, at::Tensor values) {
  queue_.push_back({frame, std::move(values)});
}

bool OutgoingConnection::advance(const std::string& place) {
  if (queue_.empty()) return true;
  if (!socket_.open()) {
    try {
      socket_ = connect_to(place);
    } catch (const std::runtime_error&) {
      return false;
    }
  }
  while (!queue_.empty()) {
    const auto& item = queue_.front();
    if (!send_bytes(&item.frame, sizeof(Frame), 0)) return later();
    if (item.values.defined() && !send_bytes(item.values.data_ptr(), item.frame.bytes, sizeof(Frame))) return later();
    queue_.pop_front();
    sent_ = 0;
  }
  return true;
}

// Sends what is left of bytes [begin, begin + bytes) of the first item; true when nothing is.
bool OutgoingConnection::send_bytes(const void* data, size_t bytes, size_t begin) {
  while (sent_ < begin + bytes) {
    const auto done = sent_ - begin;
    const auto sent = send(socket_.number(), static_cast<const char*>(data) + done, bytes - done, MSG_NOSIGNAL);
    if (sent < 0) return false;
    sent_ += static_cast<size_t>(sent);
  }
  return true;
}

bool IncomingConnection::advance(const Accept& accept, const Arrived& arrived) {
  while (true) {
    const bool in_frame = read_ < sizeof(Frame);
    const auto begin = in_frame ? 0 : sizeof(Frame);
    auto* memory = in_frame ? reinterpret_cast<char*>(&frame_) : static_cast<char*>(values_.data_ptr());
    const auto wanted = in_frame ? sizeof(Frame) : frame_.bytes;
    const auto got = recv(socket_.number(), memory + (read_ - begin), wanted - (read_ - begin), 0);
    if (got <= 0) return got < 0 && later();
    read_ += static_cast<size_t>(got);
    if (read_ == sizeof(Frame)) {
      const auto memory_for = frame_.magic == Frame::expected_magic ? accept(frame_) : std::nullopt;
      if (!memory_for) return false;
      values_ = *memory_for;
    }
    if (read_ < sizeof(Frame) || read_ < sizeof(Frame) + frame_.bytes) continue;
    arrived(frame_, values_);
    values_ = at::Tensor();
    read_ = 0;
  }
}

}  // namespace shoal
