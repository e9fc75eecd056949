#pragma once
// Stream sockets: addresses, listening, connecting.

#include <sys/socket.h>

#include <string>
#include <utility>

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
  // The caller closes it from now on.
  int release() { return std::exchange(number_, -1); }

 private:
  int number_ = -1;
};

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  std::string host() const;  // in digits
  int port() const;
};

// The first address of a host's name or number. Throws std::runtime_error with the resolver's reason.
SocketAddress resolve(const std::string& host, int port);
// A socket's own end. Throws std::system_error.
SocketAddress own_address(const Descriptor& socket);

// `type`: SOCK_STREAM or SOCK_DGRAM, and flags. Throws std::system_error.
Descriptor make_socket(const SocketAddress& address, int type);
// Listens there and on no other interface; port 0: a free one. Throws std::system_error.
Descriptor listen_on(const SocketAddress& address, int type = SOCK_STREAM);
// False, with errno, when it failed or is still under way.
bool connect_to(const Descriptor& socket, const SocketAddress& address);
// Whether the last call of a socket that never blocks has failed (errno) only because it came too early.
bool came_too_early();

}  // namespace shoal
