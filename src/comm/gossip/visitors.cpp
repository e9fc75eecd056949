#include "comm/gossip/visitors.h"

#include <sys/socket.h>

#include <algorithm>
#include <utility>

namespace shoal {

GossipVisitors::GossipVisitors(Descriptor listening, GossipPeers& peers, ValuesPool& values, OnValues on_values)
    : listening_(std::move(listening)), peers_(peers), values_(values), on_values_(std::move(on_values)) {}

void GossipVisitors::wait_for(std::vector<pollfd>& polled) const {
  for (const auto& visitor : visitors_) polled.push_back({visitor.connection.socket().number(), POLLIN, 0});
  polled.push_back({listening_.number(), POLLIN, 0});
}

void GossipVisitors::receive() {
  let_in();
  for (auto& visitor : visitors_) hear(visitor);
  show_out();
}

void GossipVisitors::forget(int rank) {
  std::erase_if(visitors_, [&](const Visitor& visitor) { return visitor.rank == rank; });
}

void GossipVisitors::let_in() {
  while (true) {
    Descriptor accepted(accept4(listening_.number(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!accepted.open()) return;
    prepare(accepted);
    Handshake handshake(peers_.job(), Handshake::Side::called, peers_.own_address().key);
    visitors_.push_back(
        {.connection = IncomingConnection(std::move(accepted), std::move(handshake)), .came = Clock::now()});
  }
}

void GossipVisitors::hear(Visitor& visitor) {
  const auto accept = [&](const Frame& frame) {
    visitor.begun = Clock::now();
    return expected(visitor, frame);
  };
  const auto arrived = [&](const Frame& frame, const at::Tensor& values) {
    if (frame.kind == FrameKind::hello) visitor.rank = static_cast<int>(frame.source);
    if (frame.kind == FrameKind::values) on_values_(frame, visitor.begun);
    peers_.take(frame, values);
  };
  visitor.ended = !visitor.connection.advance(accept, arrived);
  if (visitor.ended && visitor.rank >= 0) peers_.lose(visitor.rank);
}

std::optional<at::Tensor> GossipVisitors::expected(const Visitor& visitor, const Frame& frame) {
  const bool first = visitor.rank < 0;
  const bool known = frame.key == peers_.own_address().key && frame.source < static_cast<uint32_t>(peers_.size()) &&
                     first == (frame.kind == FrameKind::hello) &&
                     (first || visitor.rank == static_cast<int>(frame.source));
  if (!known) return std::nullopt;
  const bool names_buffer = frame.kind == FrameKind::values || frame.kind == FrameKind::taken;
  if (names_buffer && frame.buffer >= values_.size()) return std::nullopt;
  if (frame.kind != FrameKind::values) return frame.bytes == 0 ? std::optional(at::Tensor()) : std::nullopt;
  if (frame.bytes != values_.bytes_of(frame.buffer)) return std::nullopt;
  return values_.get(frame.buffer);
}

// Ends visitors that have not sent a hello in time and, if there are too many, the oldest of them.
void GossipVisitors::show_out() {
  constexpr std::chrono::seconds time_to_greet(10);
  constexpr int64_t most_strangers = 256;
  const auto latest = Clock::now() - time_to_greet;
  // A caller that has shaken hands believes that it is connected: what it sends next must not be lost.
  const auto stranger = [](const Visitor& visitor) { return visitor.rank < 0 && !visitor.connection.proved(); };
  const auto over = [&](const Visitor& visitor) {
    return visitor.ended || (stranger(visitor) && visitor.came < latest);
  };
  std::erase_if(visitors_, over);
  auto surplus = std::count_if(visitors_.begin(), visitors_.end(), stranger) - most_strangers;
  std::erase_if(visitors_, [&](const Visitor& visitor) { return stranger(visitor) && surplus-- > 0; });
}

}  // namespace shoal
