#pragma once
// TCP sockets between ranks. All are non-blocking.

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

}  // namespace shoal
