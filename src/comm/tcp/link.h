#pragma once
// Connection to one rank: frames in both directions. Never waits.

#include <chrono>
#include <cstddef>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "comm/rendezvous/peer_socket.h"
#include "comm/tcp/frame.h"

namespace shoal::tcp {

// Takes the frames of all links.
class Receiver {
 public:
  virtual ~Receiver() = default;
  // Memory for the bytes that follow a frame from `rank`; nothing if there is none yet: the frame is offered again in
  // the next Link::receive(). Throws std::exception if the frame is not valid.
  virtual std::optional<std::byte*> accept(int rank, const Frame& frame) = 0;
  // The bytes are in that memory.
  virtual void arrived(int rank, const Frame& frame) = 0;
};

class Link {
 public:
  // socket: connected and non-blocking; its peer is `rank`.
  Link(Descriptor socket, int rank);

  // Queues a frame with `bytes` of text.
  void put(Frame frame, std::string bytes, std::function<void()> sent = nullptr);
  // Queues a frame with data that stay where they are until `sent` is called: then the system has them.
  void put(Frame frame, const std::byte* data, std::function<void()> sent);
  // Sends what can be sent now.
  void flush();
  bool idle() const { return queue_.empty(); }
  // Reads no data of queued frames from now on: their memory is used for something else. Such frames are dropped. One
  // that has been sent in part is sent from a copy if it is small, else the connection ends in the midst of it.
  void take_data_back();

  // Receives what has arrived. False if there may be more: a frame has no memory yet, or others should have their turn.
  bool receive(Receiver& to);

  // Ends the connection if the peer's host has answered nothing for that long. One that answers, but takes no data, is
  // waited for: the peer is stopped, or has no memory for the next frame yet. To be called every second or so.
  void look_at_peer(std::chrono::seconds limit);
  // The peer has ended the connection, or it is broken: nothing more comes.
  bool ended() const { return ended_; }
  // Nothing more can be sent.
  bool broken() const { return broken_; }
  // Tells the peer that nothing more comes, after what is queued.
  void end();
  // Whether the peer's system does not have all that was sent.
  bool unacknowledged() const;
  const Descriptor& socket() const { return socket_; }

 private:
  struct Outgoing {
    Frame frame;
    std::string text;
    const std::byte* data;
    std::function<void()> sent;
  };
  bool fill();
  bool read_rest();

  Descriptor socket_;
  int rank_;
  std::deque<Outgoing> queue_;
  size_t sent_ = 0;      // bytes of the first frame and of what follows it
  bool broken_ = false;  // nothing more can be sent
  bool ended_ = false;
  std::vector<std::byte> buffer_;  // what was read ahead: [begin_, end_)
  size_t begin_ = 0;
  size_t end_ = 0;
  std::optional<Frame> frame_{};  // whose bytes are being read
  std::byte* memory_ = nullptr;   // for them
  size_t got_ = 0;
  HostWatch host_;
};

}  // namespace shoal::tcp
