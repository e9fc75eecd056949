#pragma once
// This rank's view of the other ranks in gossip over sockets, and its messages to them. Never waits, and has no lock.

#include <poll.h>
#include <torch/types.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "comm/gossip/channel.h"
#include "comm/gossip/connection.h"
#include "comm/gossip/frame.h"

namespace shoal {

// Place where a rank listens, and the key that its visitors must know: "PLACE KEY".
struct GossipAddress {
  std::string place;  // empty: the rank has ended
  uint64_t key = 0;
};

// ForgedValue if the line, which the rank should have written, is none.
GossipAddress read_gossip_address(const std::string& line, int rank);
std::string to_line(const GossipAddress& address);

struct GossipPeer {
  OutgoingConnection outgoing;
  bool greeted = false;
  bool gone = false;
  bool left = false;                                      // has announced that it leaves
  int64_t last_version = 0;                               // valid if the rank has left
  std::optional<Stop> stop;                               // set if the rank has stopped
  bool late = false;                                      // the last wait for it as a source timed out
  bool takes_late = false;                                // the last wait for it as a reader timed out
  std::map<size_t, std::map<int64_t, at::Tensor>> shown;  // by buffer and version
  std::map<size_t, int64_t> taken;                        // by buffer: newest version of ours that it has finished with
};

class GossipPeers {
 public:
  static constexpr size_t versions_ahead = 2;  // limit for a rank's lead over its readers

  GossipPeers(int rank, std::vector<GossipAddress> addresses, JobIdentity job);

  GossipPeer& operator[](int rank) { return peers_[rank]; }
  const GossipPeer& operator[](int rank) const { return peers_[rank]; }
  int size() const { return static_cast<int>(peers_.size()); }
  int rank() const { return rank_; }
  const JobIdentity& job() const { return job_; }
  const GossipAddress& own_address() const { return addresses_[rank_]; }

  // Queues a frame, and the values after it.
  void put(int rank, Frame frame, at::Tensor values = {});
  void tell_all(const Frame& frame);
  // All frames that ranks which receive are waiting for have been sent.
  bool all_sent() const;
  // Sends what can be sent now, and adds what to wait for. True if something is held back until older values have been
  // sent.
  bool send(std::vector<pollfd>& polled);

  // A frame from the peer that is valid. values: those that follow it.
  void take(const Frame& frame, const at::Tensor& values);
  // The rank has ended. The others are told, because only its neighbours see that.
  void lose(int rank);
  // Loses ranks whose hosts are silent. To be called every second or so.
  void look_at_hosts();
  // A new process in place of one that has ended.
  void admit(int rank, GossipAddress address);

  // Whether the peer has stopped, and all have not started afresh since.
  bool stops(int rank) const { return peers_[rank].stop && peers_[rank].stop->version > begun_; }
  void start_afresh(int64_t version);
  // Tells all that `last` was this rank's last version. Nothing if that was done.
  void leave(int64_t last);

 private:
  int64_t oldest_on_the_way() const;

  const int rank_;
  std::vector<GossipAddress> addresses_;
  const JobIdentity job_;
  std::vector<GossipPeer> peers_;
  int64_t begun_ = -1;  // stops up to this version have ended
  bool left_ = false;
};

}  // namespace shoal
