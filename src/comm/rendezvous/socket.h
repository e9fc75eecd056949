#pragma once
// Stream sockets: addresses, listening, connecting.

#include <sys/socket.h>

#include <chrono>
#include <string>
#include <utility>
#include <vector>

namespace shoal {

// An open file descriptor. Move-only.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int number) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept;
  ~Descriptor();
  int number() const { return number_; }
  bool open() const { return number_ >= 0; }
  // Releases the descriptor; the caller closes it.
  int release() { return std::exchange(number_, -1); }

 private:
  int number_ = -1;
};

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  std::string host() const;  // numeric
  int port() const;
};
// Of a numeric address.
bool is_loopback(const std::string& number);

// First address of a host name or numeric address. std::runtime_error with the resolver's reason.
SocketAddress resolve(const std::string& host, int port);
// All of them, in the resolver's order. A name that is not known is asked for again until the limit: that of a host
// that has just started, as a pod, becomes known a little later. After 3 s a line on standard error says so.
std::vector<SocketAddress> resolve_within(std::chrono::seconds limit, const std::string& host, int port);
// Local address of a socket. Throws std::system_error.
SocketAddress own_address(const Descriptor& socket);

// type: SOCK_STREAM or SOCK_DGRAM, and flags. Throws std::system_error.
Descriptor make_socket(const SocketAddress& address, int type);
// Listens on this interface only; port 0: a free one. Throws std::system_error.
Descriptor listen_on(const SocketAddress& address, int type = SOCK_STREAM);
// False, with errno, if the connection failed or is still in progress.
bool connect_to(const Descriptor& socket, const SocketAddress& address);
// Whether the last call of a non-blocking socket failed only because it would have blocked (errno).
bool came_too_early();

}  // namespace shoal
