#pragma once
// TCP sockets between ranks. All are non-blocking.

#include <chrono>
#include <string>

#include "comm/rendezvous/socket.h"

namespace shoal {

// Listens on a free port of `address`, a numeric IP address. Throws std::runtime_error.
Descriptor listen_for_peers(const std::string& address);
// "address:port" of a socket's local end.
std::string place_of(const Descriptor& socket);
// Starts a connection, which may still be in progress on return. Throws std::runtime_error.
Descriptor connect_to(const std::string& place);
// Options of both ends: no delay for small messages, and a timeout for hosts that have vanished.
void prepare(const Descriptor& socket);

// After so long without any answer a host counts as lost.
inline constexpr std::chrono::seconds longest_silence(15);

// Watches whether the host of a connected peer answers, in place of the system's own timeout, which this turns off:
// that one also ends connections whose peer takes no data, but lives.
class HostWatch {
 public:
  explicit HostWatch(const Descriptor& socket);
  // Whether the host has answered nothing for that long. One that answers for a peer that takes no data is not silent:
  // the peer is stopped, or has no memory for the data yet. To be called every second or so.
  bool silent(const Descriptor& socket, std::chrono::seconds limit = longest_silence);

 private:
  std::chrono::steady_clock::time_point answered_ = std::chrono::steady_clock::now();  // or was asked nothing
};

}  // namespace shoal
