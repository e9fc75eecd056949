#include "comm/tcp/link.h"

#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace shoal::tcp {
namespace {
constexpr size_t read_ahead = size_t{16} << 10;
constexpr size_t most_in_a_turn = size_t{1} << 20;
}  // namespace

Link::Link(Descriptor socket, int rank) : socket_(std::move(socket)), rank_(rank), host_(socket_) {}

void Link::put(Frame frame, std::string bytes, std::function<void()> sent) {
  frame.bytes = bytes.size();
  queue_.push_back({frame, std::move(bytes), nullptr, std::move(sent)});
}

void Link::put(Frame frame, const std::byte* data, std::function<void()> sent) {
  queue_.push_back({frame, {}, data, std::move(sent)});
}

void Link::flush() {
  while (!queue_.empty() && !broken_) {
    auto& first = queue_.front();
    const auto* data = first.data != nullptr ? static_cast<const void*>(first.data) : first.text.data();
    iovec parts[2];
    size_t count = 0;
    if (sent_ < sizeof(Frame)) {
      parts[count++] = {reinterpret_cast<char*>(&first.frame) + sent_, sizeof(Frame) - sent_};
    }
    const auto done = sent_ < sizeof(Frame) ? 0 : sent_ - sizeof(Frame);
    if (first.frame.bytes > done) {
      parts[count++] = {const_cast<char*>(static_cast<const char*>(data)) + done, first.frame.bytes - done};
    }
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = count;
    const auto sent = sendmsg(socket_.number(), &message, MSG_NOSIGNAL);
    if (sent < 0) {
      broken_ = !came_too_early();
      return;
    }
    sent_ += static_cast<size_t>(sent);
    if (sent_ < sizeof(Frame) + first.frame.bytes) continue;
    const auto callback = std::move(first.sent);
    queue_.pop_front();
    sent_ = 0;
    if (callback) callback();
  }
}

void Link::take_data_back() {
  constexpr uint64_t most_copied = uint64_t{1} << 20;  // more than a chunk
  if (sent_ > 0 && queue_.front().data != nullptr) {
    auto& first = queue_.front();
    if (first.frame.bytes <= most_copied) {
      first.text.assign(reinterpret_cast<const char*>(first.data), first.frame.bytes);
      first.data = nullptr;
    } else {
      broken_ = true;
      end();
    }
  }
  std::erase_if(queue_, [](const Outgoing& one) { return one.data != nullptr; });
}

bool Link::receive(Receiver& to) {
  for (size_t bytes = 0;;) {
    if (!frame_) {
      if (bytes > most_in_a_turn) return false;
      if (end_ - begin_ < sizeof(Frame)) {
        if (!fill()) return true;
        continue;
      }
      Frame frame;
      std::memcpy(&frame, buffer_.data() + begin_, sizeof frame);
      if (frame.magic != Frame::expected_magic) throw std::runtime_error("a peer has sent what is no frame");
      const auto memory = to.accept(rank_, frame);
      if (!memory) return false;
      begin_ += sizeof frame;
      frame_ = frame;
      memory_ = *memory;
      got_ = std::min<size_t>(frame.bytes, end_ - begin_);
      if (got_ > 0) std::memcpy(memory_, buffer_.data() + begin_, got_);  // a frame without bytes has no memory
      begin_ += got_;
    }
    while (got_ < frame_->bytes) {
      if (!read_rest()) return true;
    }
    bytes += sizeof(Frame) + frame_->bytes;
    to.arrived(rank_, *std::exchange(frame_, std::nullopt));
  }
}

// Reads into the buffer; false if nothing has come.
bool Link::fill() {
  if (ended_) return false;
  buffer_.resize(read_ahead);
  std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
  end_ -= std::exchange(begin_, 0);
  const auto got = recv(socket_.number(), buffer_.data() + end_, buffer_.size() - end_, 0);
  if (got <= 0) {
    ended_ = got == 0 || !came_too_early();
    return false;
  }
  end_ += static_cast<size_t>(got);
  return true;
}

// Reads what is left of the present frame's bytes and, with the same call, what follows them.
bool Link::read_rest() {
  if (ended_) return false;
  begin_ = end_ = 0;
  const size_t left = frame_->bytes - got_;
  iovec parts[2] = {{memory_ + got_, left}, {buffer_.data(), buffer_.size()}};
  const auto got = readv(socket_.number(), parts, 2);
  if (got <= 0) {
    ended_ = got == 0 || !came_too_early();
    return false;
  }
  got_ += std::min(left, static_cast<size_t>(got));
  end_ = static_cast<size_t>(got) > left ? static_cast<size_t>(got) - left : 0;
  return true;
}

bool Link::unacknowledged() const {
  int bytes = 0;
  return ioctl(socket_.number(), SIOCOUTQ, &bytes) == 0 && bytes > 0;
}

void Link::look_at_peer(std::chrono::seconds limit) {
  if (host_.silent(socket_, limit)) ended_ = broken_ = true;
}

void Link::end() {
  shutdown(socket_.number(), SHUT_WR);
}

}  // namespace shoal::tcp
