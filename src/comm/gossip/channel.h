#pragma once
// Buffers of which ranks show each other versions: what gossip needs in place of collectives. Nobody waits for another
// rank longer than it wants to, and nothing fails because one is gone.

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
  late,  // not there within the limit
  torn,  // the source has overwritten it while it was used: what use() has made of it is void
  gone,  // the source has left or ended without having shown it
};

struct Reading {
  Arrival arrival = Arrival::late;
  int64_t version = 0;  // of what was used
};

struct Stop {
  int64_t version = 0;  // shown last
  uint32_t reason = 0;
};

// Ranks are those of the group it was opened on. A rank's calls come from one thread.
class GossipChannel {
 public:
  using Limit = std::chrono::milliseconds;
  using Use = std::function<void(const at::Tensor& values)>;

  virtual ~GossipChannel() = default;

  // Memory [numel] for the buffer's next version, not that of the last one. Waits up to `limit` for readers of what was
  // in it before, who then miss that. A reader that has been waited for in vain is not waited for again until it has
  // caught up.
  virtual at::Tensor draft(size_t buffer, Limit limit) = 0;
  // Shows the draft as `version`, which grows. `readers` may be waited for, see draft().
  virtual void publish(size_t buffer, int64_t version, const std::vector<int>& readers) = 0;
  // Calls `use` with what `source` has shown as `version`, or as the next one that is still there. A source that has
  // been waited for in vain is not waited for again until it has caught up; the last that it has shown is used, once.
  // The tensor is valid during the call only.
  virtual Reading read(size_t buffer, int64_t version, int source, Limit limit, const Use& use) = 0;
  // Whether the rank has left or ended, as far as is known here, and will not have shown `version` of all buffers.
  virtual bool gone(int rank, int64_t version) = 0;
  // Nobody will read what this rank has shown so far.
  virtual void forget() = 0;
  // Tells all ranks that this one does not go on after `version` before all have begun anew, and why, in a number of
  // the caller's. They no longer wait for it.
  virtual void stop(int64_t version, uint32_t reason) = 0;
  // Of a rank that does not go on.
  virtual std::optional<Stop> stopped(int rank) = 0;
  // All ranks begin anew after `version`: nobody will read what has been shown so far, and who had stopped goes on.
  virtual void begin_anew(int64_t version) = 0;
  // This rank shows no more; what it has shown can still be read.
  virtual void leave() = 0;

  // Where a rank that joins later finds this rank's buffers.
  virtual std::string address() const = 0;
  // A new process has taken the place of a rank that has ended; it shows its buffers at `address`. Throws
  // std::exception when it cannot be reached.
  virtual void admit(int rank, const std::string& address) = 0;
};

// Collective over the group. Memory that ranks share where they all run on one host, else sockets between them.
std::unique_ptr<GossipChannel> open_gossip_channel(const Group& group, const std::vector<GossipBuffer>& buffers);
// For a rank that joins later, with the same buffers: the others' addresses, by rank; empty for those that have ended.
// They must admit this rank before they see what it shows. Not collective. CommError when one cannot be reached.
std::unique_ptr<GossipChannel> join_gossip_channel(const Group& group, const std::vector<GossipBuffer>& buffers,
                                                   const std::vector<std::string>& addresses);

}  // namespace shoal
