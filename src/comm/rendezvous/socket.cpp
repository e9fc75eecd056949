#include "comm/rendezvous/socket.h"

#include <fmt/format.h>
#include <netdb.h>
#include <netinet/in.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>

#include "base/print_to_stderr.h"

namespace shoal {
namespace {

[[noreturn]] void fail_with_errno(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

// As number or name; the result is the resolver's code.
int look_up(const std::string& host, int port, std::vector<SocketAddress>& addresses) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* list = nullptr;
  const int error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list);
  if (error != 0) return error;
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> found(list, freeaddrinfo);
  for (const auto* one = found.get(); one != nullptr; one = one->ai_next) {
    SocketAddress address;
    std::memcpy(&address.storage, one->ai_addr, one->ai_addrlen);
    address.length = one->ai_addrlen;
    // The resolver may give one twice, as for a line with ::1 beside one with 127.0.0.1 in /etc/hosts.
    const auto same = [&](const SocketAddress& other) { return other.host() == address.host(); };
    if (std::none_of(addresses.begin(), addresses.end(), same)) addresses.push_back(address);
  }
  return 0;
}

// Whether the resolver may give another answer later. A name server that is starting may refuse, or fail.
bool may_change(int error) {
  return error != EAI_FAMILY && error != EAI_SERVICE && error != EAI_BADFLAGS;
}

// Whether a text that is no address now may be a host's name later.
bool may_be_name(const std::string& host) {
  const auto is_letter = [](unsigned char one) { return std::isalpha(one) != 0; };
  const auto fits = [](unsigned char one) { return std::isalnum(one) != 0 || one == '-' || one == '.' || one == '_'; };
  return std::all_of(host.begin(), host.end(), fits) && std::any_of(host.begin(), host.end(), is_letter);
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

std::string SocketAddress::host() const {
  char text[NI_MAXHOST];
  const int error = getnameinfo(get(), length, text, sizeof text, nullptr, 0, NI_NUMERICHOST);
  if (error != 0) throw std::runtime_error(gai_strerror(error));
  return text;
}

int SocketAddress::port() const {
  const auto* v4 = reinterpret_cast<const sockaddr_in*>(&storage);
  const auto* v6 = reinterpret_cast<const sockaddr_in6*>(&storage);
  return ntohs(storage.ss_family == AF_INET6 ? v6->sin6_port : v4->sin_port);
}

bool is_loopback(const std::string& number) {
  return number.starts_with("127.") || number == "::1";
}

SocketAddress resolve(const std::string& host, int port) {
  return resolve_within(std::chrono::seconds(0), host, port).front();
}

std::vector<SocketAddress> resolve_within(std::chrono::seconds limit, const std::string& host, int port) {
  constexpr std::chrono::seconds silently(3);
  const auto begin = std::chrono::steady_clock::now();
  bool told = false;
  std::vector<SocketAddress> addresses;
  while (const int error = look_up(host, port, addresses)) {
    const std::string why = gai_strerror(error);
    const bool asks_again = limit.count() > 0 && may_change(error) && may_be_name(host);
    if (!asks_again) throw std::runtime_error(why);
    const auto waited = std::chrono::steady_clock::now() - begin;
    if (waited >= limit) throw std::runtime_error(fmt::format("{} (tried for {} s)", why, limit.count()));
    if (waited >= silently && !std::exchange(told, true)) {
      print_to_stderr("shoal: the name '{}' is not known: {}; it is asked for until {} s are over\n", host, why,
                      limit.count());
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
  }
  return addresses;
}

SocketAddress own_address(const Descriptor& socket) {
  SocketAddress address;
  address.length = sizeof address.storage;
  if (getsockname(socket.number(), reinterpret_cast<sockaddr*>(&address.storage), &address.length) != 0) {
    fail_with_errno("getsockname");
  }
  return address;
}

Descriptor make_socket(const SocketAddress& address, int type) {
  Descriptor made(socket(address.storage.ss_family, type | SOCK_CLOEXEC, 0));
  if (!made.open()) fail_with_errno("socket");
  return made;
}

Descriptor listen_on(const SocketAddress& address, int type) {
  auto listening = make_socket(address, type);
  const int yes = 1;
  setsockopt(listening.number(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  const int no = 0;  // all interfaces: those of IPv4, too, whatever the system's default is
  if (address.storage.ss_family == AF_INET6) setsockopt(listening.number(), IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof no);
  if (bind(listening.number(), address.get(), address.length) != 0) fail_with_errno("bind");
  if (listen(listening.number(), 1024) != 0) fail_with_errno("listen");
  return listening;
}

bool connect_to(const Descriptor& socket, const SocketAddress& address) {
  return connect(socket.number(), address.get(), address.length) == 0;
}

bool came_too_early() {
  return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINPROGRESS || errno == ENOTCONN || errno == EINTR;
}

}  // namespace shoal
