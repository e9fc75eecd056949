#pragma once
// Channels of gossip: ranks show each other versions of their buffers instead of calling collectives. No rank waits for
// another longer than it wants to, and nothing fails because a rank is gone.

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "shoal/group.h"

namespace shoal {

struct GossipBuffer {
  int64_t numel = 0;
  at::ScalarType dtype = at::kFloat;
};

enum class Arrival {
  here,
  late,  // not available within the limit
  torn,  // overwritten by the source during use(), whose result is invalid
  gone,  // the source has left or ended without showing it
};

struct Reading {
  Arrival arrival = Arrival::late;
  int64_t version = 0;  // version that was used
};

struct Stop {
  int64_t version = 0;  // last version shown
  uint32_t reason = 0;
};

// Ranks are those of the group that the channel was opened on. A rank makes all its calls from one thread.
class GossipChannel {
 public:
  using Limit = std::chrono::milliseconds;
  using Use = std::function<void(const at::Tensor& values)>;

  virtual ~GossipChannel() = default;

  // Memory [numel] for the buffer's next version. Its former contents are an older version than the last one; waits up
  // to `limit` for readers of that version, which otherwise miss it. A reader that has timed out is not waited for
  // again until it has caught up.
  virtual at::Tensor draft(size_t buffer, Limit limit) = 0;
  // Shows the draft as `version`, which must grow. readers: the ranks that draft() may wait for.
  virtual void publish(size_t buffer, int64_t version, const std::vector<int>& readers) = 0;
  // Calls `use` with the values that `source` showed as `version`, or as the oldest later version that still exists. A
  // source that has timed out is not waited for again until it has caught up; its last version is used, once. The
  // tensor is valid during the call only.
  virtual Reading read(size_t buffer, int64_t version, int source, Limit limit, const Use& use) = 0;
  // Whether the rank, as far as is known, has left or ended and will not show `version` of all buffers.
  virtual bool gone(int rank, int64_t version) = 0;
  // Whether the rank, as far as is known, has ended without having left.
  virtual bool lost(int rank) = 0;
  // Tells that no rank will read what this rank has shown so far.
  virtual void forget() = 0;
  // Tells all ranks that this one stops after `version` until all start afresh. reason: a number that the caller
  // defines. The others no longer wait for this rank.
  virtual void stop(int64_t version, uint32_t reason) = 0;
  // The stop of a rank that has stopped.
  virtual std::optional<Stop> stopped(int rank) = 0;
  // All ranks start afresh after `version`: nobody will read what was shown so far, and stopped ranks continue.
  virtual void start_afresh(int64_t version) = 0;
  // This rank shows nothing more; what it has shown stays readable.
  virtual void leave() = 0;

  // Address at which a rank that joins later finds this rank's buffers.
  virtual std::string address() const = 0;
  // Accepts a new process in place of a rank that has ended; it shows its buffers at `address`. Throws std::exception
  // if it cannot be reached.
  virtual void admit(int rank, const std::string& address) = 0;
};

// Opens shared memory if all ranks are on one host, else sockets. Collective over the group.
std::unique_ptr<GossipChannel> open_gossip_channel(const Group& group, const std::vector<GossipBuffer>& buffers);
// Opens the channel on a rank that joins later, with the same buffers. addresses: by rank; empty for ranks that have
// ended. The others must admit this rank before they see its values. Not collective. CommError if a rank cannot be
// reached.
std::unique_ptr<GossipChannel> join_gossip_channel(const Group& group, const std::vector<GossipBuffer>& buffers,
                                                   const std::vector<std::string>& addresses);

}  // namespace shoal
