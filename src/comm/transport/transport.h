#pragma once
// Interface of transports. A single function issues calls, so that decorators (recording, fault injection) are a few
// lines.

#include <chrono>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "shoal/detail/call.h"

namespace shoal {

using Milliseconds = std::chrono::milliseconds;

// The connection to a rank has ended while something was still to come from it, or to go there.
class PeerLost : public std::runtime_error {
 public:
  explicit PeerLost(int world_rank)
      : std::runtime_error("the connection to rank " + std::to_string(world_rank) + " has ended"),
        world_rank_(world_rank) {}
  int world_rank() const { return world_rank_; }

 private:
  int world_rank_;
};

// A rank of the group has failed and takes no part any more; what() is its reason.
class Abandoned : public std::runtime_error {
 public:
  // culprit: the world rank that caused it; -1: unknown.
  Abandoned(const std::string& why, int culprit) : std::runtime_error(why), culprit_(culprit) {}
  int culprit() const { return culprit_; }

 private:
  int culprit_;
};

// One operation in flight inside a transport.
class TransportWork {
 public:
  virtual ~TransportWork() = default;

  virtual bool done() = 0;
  // Waits up to `slice`; true when finished. `remaining` is the time to the deadline, for transports that cannot wait
  // in slices. Throws any std::exception if the operation failed.
  virtual bool wait_for(Milliseconds slice, Milliseconds remaining) = 0;
  // What is missing, for the error of a wait that timed out; empty if the transport does not know.
  virtual std::string waits_for() { return ""; }
  // Whether the operation still needs something of that rank, which may end otherwise.
  virtual bool needs(int /*world_rank*/) { return true; }
  // Sender of a finished receive, if the transport had to find it.
  virtual int source() const { return any_source; }
};

// Implementations keep a call's tensors alive until the operation is finished. Arguments are already checked by Group.
class Transport {
 public:
  virtual ~Transport() = default;

  virtual std::string name() const = 0;
  // For transports that connect at a first call, and without a deadline. What this rank has to tell the others before
  // this call is issued; nothing for most calls. introduced() then gets the texts of all ranks, by rank, and may throw
  // UsageError, on all of them.
  virtual std::optional<std::string> introduction(const Call& /*call*/) { return std::nullopt; }
  virtual void introduced(const Call& /*call*/, const std::vector<std::string>& /*texts*/) {}
  virtual std::unique_ptr<TransportWork> issue(const Call& call) = 0;
  // Waits, for a limited time, until peers have read the messages that this process holds for them. Destruction does
  // so, too.
  virtual void await_readers() {}
  // Whether the destructor waits for operations in flight, which may never end once a peer has failed.
  virtual bool joins_threads() const { return false; }
  // Whether the transport detects different calls before any data are changed.
  virtual bool checks_agreement() const { return false; }
  // Stops at once and for good, as `why` says: operations in flight fail, and nothing is sent or received any more. For
  // an elastic job, whose ranks give up all groups of a generation that has lost a rank.
  virtual void give_up(const std::string& /*why*/) {}
  // This rank has failed and takes no part any more, while its program may go on. When this returns, no rank reads or
  // writes this rank's tensors for an operation in flight. Operations of the others fail as Abandoned says, also those
  // that they call later.
  virtual void abandon(const Abandoned& /*why*/) {}
  // Throws what another rank has told this one by abandon(), for waits in which no operation of this transport is in
  // flight.
  virtual void require_not_abandoned() {}
  // Called once all ranks that live have given up: memory of this transport may be freed and used again.
  virtual void given_up_by_all() {}
  // Returns `numel` zeros; see Group::allocate.
  virtual at::Tensor allocate(int64_t numel, const at::TensorOptions& options);
};

// Valid values of WorldOptions::transport in this build.
std::vector<std::string> transport_names();

}  // namespace shoal
