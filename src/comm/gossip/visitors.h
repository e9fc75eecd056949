#pragma once
// Connections of other ranks to this one in gossip over sockets. Never waits, and has no lock.

#include <poll.h>

#include <functional>
#include <vector>

#include "comm/gossip/connection.h"
#include "comm/gossip/peers.h"
#include "comm/gossip/values_pool.h"
#include "shoal/telemetry.h"

namespace shoal {

class GossipVisitors {
 public:
  // Called when values have come. begin: when their frame came.
  using OnValues = std::function<void(const Frame& frame, Clock::time_point begin)>;

  // peers, values: must outlive this object.
  GossipVisitors(Descriptor listening, GossipPeers& peers, ValuesPool& values, OnValues on_values);

  // Adds what to wait for.
  void wait_for(std::vector<pollfd>& polled) const;
  // Lets in who has come, and gives the peers the frames that have arrived.
  void receive();
  // Ends the connections of a rank.
  void forget(int rank);

 private:
  struct Visitor {
    IncomingConnection connection;
    int rank = -1;  // known after its hello
    bool ended = false;
    Clock::time_point came{};
    Clock::time_point begun{};  // start of the frame in progress
  };

  void let_in();
  void hear(Visitor& visitor);
  std::optional<at::Tensor> expected(const Visitor& visitor, const Frame& frame);
  void show_out();

  const Descriptor listening_;
  GossipPeers& peers_;
  ValuesPool& values_;
  const OnValues on_values_;
  std::vector<Visitor> visitors_;
};

}  // namespace shoal
