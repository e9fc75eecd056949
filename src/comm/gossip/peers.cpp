#include "comm/gossip/peers.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "comm/store/authenticated_store.h"

namespace shoal {

GossipAddress read_gossip_address(const std::string& line, int rank) {
  const auto blank = line.find(' ');
  const auto key = number_in<uint64_t>(line.substr(blank + 1), fmt::format("gossip address of rank {}", rank));
  return {line.substr(0, blank), key};
}

std::string to_line(const GossipAddress& address) {
  return fmt::format("{} {}", address.place, address.key);
}

GossipPeers::GossipPeers(int rank, std::vector<GossipAddress> addresses, JobIdentity job)
    : rank_(rank), addresses_(std::move(addresses)), job_(std::move(job)), peers_(addresses_.size()) {
  for (size_t other = 0; other < peers_.size(); ++other) peers_[other].gone = addresses_[other].place.empty();
}

void GossipPeers::put(int rank, Frame frame, at::Tensor values) {
  auto& peer = peers_[rank];
  frame.source = static_cast<uint32_t>(rank_);
  frame.key = addresses_[rank].key;
  if (!std::exchange(peer.greeted, true)) peer.outgoing.put({.source = frame.source, .key = frame.key});
  peer.outgoing.put(frame, std::move(values));
}

void GossipPeers::tell_all(const Frame& frame) {
  for (int rank = 0; rank < size(); ++rank) {
    if (rank != rank_ && !peers_[rank].gone) put(rank, frame);
  }
}

bool GossipPeers::all_sent() const {
  return std::all_of(peers_.begin(), peers_.end(),
                     [](const GossipPeer& peer) { return peer.gone || peer.outgoing.idle(); });
}

// Oldest version being sent. On a slow link, two versions at once would take twice as long each while some rank waits
// for the older one. Peers that receive nothing do not count.
int64_t GossipPeers::oldest_on_the_way() const {
  auto oldest = std::numeric_limits<int64_t>::max();
  for (const auto& peer : peers_) {
    const auto version = peer.gone || !peer.outgoing.moves() ? std::nullopt : peer.outgoing.version();
    if (version) oldest = std::min(oldest, *version);
  }
  return oldest;
}

bool GossipPeers::send(std::vector<pollfd>& polled) {
  bool held_back = false;
  for (int rank = 0; rank < size(); ++rank) {
    auto& peer = peers_[rank];
    if (peer.gone) continue;
    const auto version = peer.outgoing.version();
    if (version && *version > oldest_on_the_way()) {
      held_back = true;
      continue;
    }
    const auto& [place, key] = addresses_[rank];
    if (!peer.outgoing.advance(place, job_, key)) lose(rank);
    if (!peer.gone && !peer.outgoing.idle()) {
      polled.push_back({peer.outgoing.socket().number(), peer.outgoing.awaits(), 0});
    }
  }
  return held_back;
}

void GossipPeers::take(const Frame& frame, const at::Tensor& values) {
  auto& peer = peers_[frame.source];
  switch (frame.kind) {
    case FrameKind::hello:
      return;
    case FrameKind::values: {
      auto& shown = peer.shown[frame.buffer];
      shown[frame.version] = values;
      while (shown.size() > versions_ahead) shown.erase(shown.begin());
      return;
    }
    case FrameKind::taken:
      peer.taken[frame.buffer] = std::max(peer.taken[frame.buffer], frame.version);
      return;
    case FrameKind::bye:
      peer.gone = peer.left = true;
      peer.last_version = frame.version;
      return;
    case FrameKind::lost: {
      // Of a former process in that place it does not count.
      const bool present = frame.buffer < peers_.size() && static_cast<int>(frame.buffer) != rank_ &&
                           static_cast<uint64_t>(frame.version) == addresses_[frame.buffer].key;
      if (present) peers_[frame.buffer].gone = true;
      return;
    }
    case FrameKind::stop:
      peer.stop = Stop{.version = frame.version, .reason = frame.buffer};
      return;
  }
}

void GossipPeers::lose(int rank) {
  if (std::exchange(peers_[rank].gone, true) || left_) return;
  tell_all({.kind = FrameKind::lost,
            .buffer = static_cast<uint32_t>(rank),
            .version = static_cast<int64_t>(addresses_[rank].key)});
}

void GossipPeers::look_at_hosts() {
  for (int rank = 0; rank < size(); ++rank) {
    if (!peers_[rank].gone && peers_[rank].outgoing.silent()) lose(rank);
  }
}

void GossipPeers::admit(int rank, GossipAddress address) {
  addresses_[rank] = std::move(address);
  peers_[rank] = GossipPeer();
}

void GossipPeers::start_afresh(int64_t version) {
  begun_ = version;
  for (auto& peer : peers_) peer.late = peer.takes_late = false;
}

void GossipPeers::leave(int64_t last) {
  if (std::exchange(left_, true)) return;
  tell_all({.kind = FrameKind::bye, .version = last});
}

}  // namespace shoal
