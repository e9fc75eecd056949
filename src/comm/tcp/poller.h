#pragma once
// Waits for events of several sockets.

#include <chrono>
#include <vector>

#include "comm/rendezvous/socket.h"

namespace shoal::tcp {

class Poller {
 public:
  // sockets: all are watched for nothing at first. Throws std::system_error.
  explicit Poller(const std::vector<const Descriptor*>& sockets);  // nullptr: none in this place

  // What to wait for at a socket. May be called while another thread waits.
  void watch(size_t which, bool input, bool output);
  // Places of the sockets that have input or room for output, or are broken. Waits until there is one, wake(), or the
  // end of `limit`.
  std::vector<size_t> wait(std::chrono::milliseconds limit) const;
  void wake() const;

 private:
  std::vector<const Descriptor*> sockets_;
  std::vector<unsigned> watched_;  // events by place
  Descriptor epoll_;
  Descriptor wake_;
};

}  // namespace shoal::tcp
