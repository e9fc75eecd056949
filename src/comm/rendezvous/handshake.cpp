#include "comm/rendezvous/handshake.h"

#include <algorithm>
#include <cerrno>
#include <string_view>

namespace shoal {
namespace {

constexpr int steps_of_handshake = 3;

std::string as_text(const Mac& bytes) {
  return {bytes.begin(), bytes.end()};
}

Mac as_mac(std::string_view text) {
  Mac bytes{};
  std::copy_n(text.begin(), bytes.size(), bytes.begin());
  return bytes;
}

}  // namespace

Handshake::Handshake(const JobIdentity& job, Side side, uint64_t channel)
    : job_(&job),
      side_(side),
      channel_(std::to_string(channel)),
      state_(job.has_secret() ? State::under_way : State::done) {
  if (state_ == State::done) return;
  own_ = random_challenge();
  begin();
}

// Both ends use the same order of challenges; the purpose distinguishes their proofs.
Mac Handshake::proof(Side of) const {
  const auto own = as_text(own_);
  const auto theirs = as_text(theirs_);
  const bool called = side_ == Side::called;
  return job_->mac(of == Side::caller ? "connection, caller" : "connection, called",
                   {channel_, called ? own : theirs, called ? theirs : own});
}

void Handshake::begin() {
  moved_ = 0;
  constexpr size_t one = sizeof(Mac);
  if (!speaks()) {
    message_.assign(step_ == 1 ? 2 * one : one, '\0');
  } else if (step_ == 0) {
    message_ = as_text(own_);
  } else {
    message_ = (step_ == 1 ? as_text(own_) : "") + as_text(proof(side_));
  }
}

// False if the received message is not a valid proof.
bool Handshake::end() {
  if (speaks()) return true;
  const std::string_view heard(message_);
  if (step_ < 2) theirs_ = as_mac(heard);
  if (step_ == 0) return true;
  const auto other = side_ == Side::caller ? Side::called : Side::caller;
  return same(as_mac(heard.substr(heard.size() - sizeof(Mac))), proof(other));
}

Handshake::State Handshake::advance(const Descriptor& socket) {
  while (state_ == State::under_way) {
    auto* rest = message_.data() + moved_;
    const auto size = message_.size() - moved_;
    const auto moved =
        speaks() ? send(socket.number(), rest, size, MSG_NOSIGNAL) : recv(socket.number(), rest, size, 0);
    if (moved < 0 && came_too_early()) break;
    if (moved <= 0) {
      const bool closed = moved == 0 || errno == ECONNRESET || errno == EPIPE;
      state_ = closed ? State::refused : State::unreachable;
      break;
    }
    moved_ += static_cast<size_t>(moved);
    if (moved_ < message_.size()) continue;
    if (!end()) {
      state_ = State::refused;
    } else if (++step_ == steps_of_handshake) {
      state_ = State::done;
    } else {
      begin();
    }
  }
  return state_;
}

}  // namespace shoal
