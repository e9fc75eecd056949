#pragma once
// Connection for one direction of gossip between two ranks: frames over non-blocking TCP.

#include <torch/types.h>

#include <chrono>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "comm/gossip/frame.h"
#include "comm/rendezvous/handshake.h"
#include "comm/rendezvous/peer_socket.h"

namespace shoal {

// Outgoing frames to one rank.
class OutgoingConnection {
 public:
  void put(const Frame& frame, at::Tensor values = {});
  // Sends what can be sent now; the first call connects and shakes hands. key: of the called channel. False if the
  // connection is broken for good.
  bool advance(const std::string& place, const JobIdentity& job, uint64_t key);
  // Events to poll the socket for.
  short awaits() const;
  bool idle() const { return queue_.empty(); }
  // Version of the values that are queued next or being sent; none if there are none.
  std::optional<int64_t> version() const;
  // Whether the peer has received something lately.
  bool moves() const { return std::chrono::steady_clock::now() - moved_ < std::chrono::milliseconds(100); }
  // Whether the peer's host has answered nothing for longer than a host may. To be called every second or so.
  bool silent() { return host_ && host_->silent(socket_); }
  const Descriptor& socket() const { return socket_; }

 private:
  struct Item {
    Frame frame;
    at::Tensor values;
  };
  Handshake::State greet(const std::string& place, const JobIdentity& job, uint64_t key);
  bool send_bytes(const void* data, size_t bytes, size_t begin);

  Descriptor socket_;
  std::optional<Handshake> handshake_;  // with the present peer of the socket
  std::optional<HostWatch> host_;       // from the end of the handshake on
  std::optional<std::chrono::steady_clock::time_point> first_call_;
  int calls_in_vain_ = 0;  // that reached nobody, or came late
  std::deque<Item> queue_;
  size_t sent_ = 0;  // bytes sent of the first item, including its frame
  std::chrono::steady_clock::time_point moved_{};
};

// Incoming frames from one rank.
class IncomingConnection {
 public:
  IncomingConnection(Descriptor socket, Handshake handshake)
      : socket_(std::move(socket)), handshake_(std::move(handshake)) {}

  // Returns memory for the values that follow a frame, undefined if none follow; nothing if the frame is invalid.
  using Accept = std::function<std::optional<at::Tensor>(const Frame& frame)>;
  using Arrived = std::function<void(const Frame& frame, const at::Tensor& values)>;
  // Shakes hands, then reads what has arrived. False if the connection has ended, is broken, or has delivered an
  // invalid frame.
  bool advance(const Accept& accept, const Arrived& arrived);
  // Whether the caller has proved that it belongs to the job.
  bool proved() const { return handshake_.proved(); }
  const Descriptor& socket() const { return socket_; }

 private:
  Descriptor socket_;
  Handshake handshake_;
  Frame frame_;
  size_t read_ = 0;  // bytes read of the frame and its values
  at::Tensor values_;
};

}  // namespace shoal
