#pragma once
// One direction of gossip between two ranks: frames over a TCP connection that never blocks.

#include <torch/types.h>

#include <chrono>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "comm/gossip/frame.h"
#include "comm/gossip/handshake.h"
#include "comm/rendezvous/socket.h"

namespace shoal {

// Listens on a free port of `address`, an IP address in digits. Throws std::runtime_error.
Descriptor listen_for_gossip(const std::string& address);
// "address:port" of a socket's own end.
std::string place_of(const Descriptor& socket);
// A connection that may still be under way. Throws std::runtime_error.
Descriptor connect_to(const std::string& place);
// Settings of either end: no delay for small frames, and an end of the wait for a host that has vanished.
void prepare(const Descriptor& socket);

// Frames to one rank.
class OutgoingConnection {
 public:
  void put(const Frame& frame, at::Tensor values = {});
  // Sends what can be sent now; the first call connects and shakes hands. `key`: of the channel that is called. False
  // when the connection is broken, for good.
  bool advance(const std::string& place, const JobIdentity& job, uint64_t key);
  // What to poll the socket for.
  short awaits() const;
  bool idle() const { return queue_.empty(); }
  // The version whose values come next or are on their way; none: no values do.
  std::optional<int64_t> version() const;
  // Whether the other end has taken something lately.
  bool moves() const { return std::chrono::steady_clock::now() - moved_ < std::chrono::milliseconds(100); }
  const Descriptor& socket() const { return socket_; }

 private:
  struct Item {
    Frame frame;
    at::Tensor values;
  };
  Handshake::State greet(const std::string& place, const JobIdentity& job, uint64_t key);
  bool send_bytes(const void* data, size_t bytes, size_t begin);

  Descriptor socket_;
  std::optional<Handshake> handshake_;  // with whoever is at the other end of the socket
  int calls_ = 0;
  std::deque<Item> queue_;
  size_t sent_ = 0;  // of the first item, its frame included
  std::chrono::steady_clock::time_point moved_{};
};

// Frames from one rank.
class IncomingConnection {
 public:
  IncomingConnection(Descriptor socket, Handshake handshake)
      : socket_(std::move(socket)), handshake_(std::move(handshake)) {}

  // Memory for what follows a frame, of its bytes, undefined where nothing follows; none: the frame is wrong.
  using Accept = std::function<std::optional<at::Tensor>(const Frame& frame)>;
  using Arrived = std::function<void(const Frame& frame, const at::Tensor& values)>;
  // Shakes hands, then reads what is there. False when the connection has ended, is broken, or has brought a frame that
  // is wrong.
  bool advance(const Accept& accept, const Arrived& arrived);
  const Descriptor& socket() const { return socket_; }

 private:
  Descriptor socket_;
  Handshake handshake_;
  Frame frame_;
  size_t read_ = 0;  // of the frame and its values
  at::Tensor values_;
};

}  // namespace shoal
