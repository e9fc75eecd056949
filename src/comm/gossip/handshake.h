#pragma once
// Handshake of two processes of a job at the start of a connection.

#include <cstdint>
#include <string>

#include "comm/rendezvous/job_identity.h"
#include "comm/rendezvous/socket.h"

namespace shoal {

// Each end shows that it knows the job's secret:
//
//   called   a challenge
//   caller   a challenge of its own, and the MAC of both
//   called   another MAC of both
//
// Challenges are random, so that nothing recorded serves again. Where the job has no secret nothing is said. Shows who
// is there when a connection begins; what comes later is not protected.
class Handshake {
 public:
  enum class Side { caller, called };
  enum class State { under_way, done, refused };

  // `channel`: the key of the channel that is called.
  Handshake(const JobIdentity& job, Side side, uint64_t channel);

  // Says and hears what can be said and heard now. Never blocks.
  State advance(const Descriptor& socket);
  // Whether it waits for the other end, and not for room to speak.
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
  std::string message_;  // of this step
  size_t moved_ = 0;     // of it
};

}  // namespace shoal
