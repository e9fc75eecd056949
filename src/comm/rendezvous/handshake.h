#pragma once
// Handshake of two processes of a job at the start of a connection.

#include <cstdint>
#include <string>

#include "comm/rendezvous/job_identity.h"
#include "comm/rendezvous/socket.h"

namespace shoal {

// Each end proves that it knows the job's secret:
//
//   called   a challenge
//   caller   a challenge of its own, and the MAC of both
//   called   another MAC of both
//
// Challenges are random, so that a recorded handshake is useless. Without a secret nothing is exchanged. Authenticates
// the peer when the connection begins; later traffic is not protected.
class Handshake {
 public:
  enum class Side { caller, called };
  enum class State {
    under_way,
    done,
    refused,      // the peer has closed the connection or does not know the secret
    unreachable,  // no connection came about
  };

  // channel: the key of the called channel.
  Handshake(const JobIdentity& job, Side side, uint64_t channel);

  // Sends and receives what is possible now. Never blocks.
  State advance(const Descriptor& socket);
  // Whether the peer has proved that it knows the job's secret.
  bool proved() const { return state_ == State::done && step_ > 0; }
  // Whether it waits to receive rather than to send.
  bool listens() const { return state_ == State::under_way && !speaks(); }

 private:
  bool speaks() const { return (step_ % 2 == 0) == (side_ == Side::called); }
  void begin();
  bool end();
  Mac proof(Side of) const;

  const JobIdentity* job_;
  Side side_;
  std::string channel_;
  State state_;
  int step_ = 0;
  Mac own_{};  // challenges
  Mac theirs_{};
  std::string message_;  // message of this step
  size_t moved_ = 0;     // bytes of it that were sent or received
};

}  // namespace shoal
