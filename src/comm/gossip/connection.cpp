#include "comm/gossip/connection.h"

#include <poll.h>

#include <exception>

namespace shoal {

void OutgoingConnection::put(const Frame& frame, at::Tensor values) {
  if (queue_.empty()) moved_ = std::chrono::steady_clock::now();
  queue_.push_back({frame, std::move(values)});
}

std::optional<int64_t> OutgoingConnection::version() const {
  if (queue_.empty() || queue_.front().frame.kind != FrameKind::values) return std::nullopt;
  return queue_.front().frame.version;
}

bool OutgoingConnection::advance(const std::string& place, const JobIdentity& job, uint64_t key) {
  if (queue_.empty()) return true;
  const auto greeted = greet(place, job, key);
  if (greeted != Handshake::State::done) return greeted == Handshake::State::under_way;
  if (!host_) host_.emplace(socket_);
  while (!queue_.empty()) {
    const auto& item = queue_.front();
    if (!send_bytes(&item.frame, sizeof(Frame), 0)) return came_too_early();
    if (item.values.defined() && !send_bytes(item.values.data_ptr(), item.frame.bytes, sizeof(Frame)))
      return came_too_early();
    queue_.pop_front();
    sent_ = 0;
  }
  return true;
}

// Calls again if the peer ends the connection before the handshake is complete: a peer with too many visitors ends the
// oldest, and where strangers call all the time that may be this rank, several times. A rank that stood still meanwhile
// has called once in all that time, so the last calls count as well as the time.
Handshake::State OutgoingConnection::greet(const std::string& place, const JobIdentity& job, uint64_t key) {
  constexpr std::chrono::seconds time_to_be_heard(15);
  constexpr int most_calls_in_vain = 3;
  while (true) {
    if (!socket_.open()) {
      if (!first_call_) first_call_ = std::chrono::steady_clock::now();
      try {
        socket_ = connect_to(place);
      } catch (const std::exception&) {  // nobody there, or not a place at all
        return Handshake::State::unreachable;
      }
      handshake_.emplace(job, Handshake::Side::caller, key);
    }
    const auto state = handshake_->advance(socket_);
    if (state == Handshake::State::done || state == Handshake::State::under_way) return state;
    socket_ = Descriptor();
    const bool had_time = std::chrono::steady_clock::now() - *first_call_ > time_to_be_heard;
    if ((state == Handshake::State::unreachable || had_time) && ++calls_in_vain_ == most_calls_in_vain) return state;
  }
}

short OutgoingConnection::awaits() const {
  return handshake_ && handshake_->listens() ? POLLIN : POLLOUT;
}

// Sends the rest of bytes [begin, begin + bytes) of the first item; true when all are sent.
bool OutgoingConnection::send_bytes(const void* data, size_t bytes, size_t begin) {
  while (sent_ < begin + bytes) {
    const auto done = sent_ - begin;
    const auto sent = send(socket_.number(), static_cast<const char*>(data) + done, bytes - done, MSG_NOSIGNAL);
    if (sent < 0) return false;
    sent_ += static_cast<size_t>(sent);
    moved_ = std::chrono::steady_clock::now();
  }
  return true;
}

bool IncomingConnection::advance(const Accept& accept, const Arrived& arrived) {
  const auto greeted = handshake_.advance(socket_);
  if (greeted != Handshake::State::done) return greeted == Handshake::State::under_way;
  while (true) {
    const bool in_frame = read_ < sizeof(Frame);
    const auto begin = in_frame ? 0 : sizeof(Frame);
    auto* memory = in_frame ? reinterpret_cast<char*>(&frame_) : static_cast<char*>(values_.data_ptr());
    const auto wanted = in_frame ? sizeof(Frame) : frame_.bytes;
    const auto got = recv(socket_.number(), memory + (read_ - begin), wanted - (read_ - begin), 0);
    if (got <= 0) return got < 0 && came_too_early();
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
