#pragma once
// Transport over any c10d backend.

#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "comm/transport/transport.h"

namespace shoal {

// before_collective: called with each collective before the backend receives it. disconnect: ends the connections to
// all peers, so that operations in flight fail. With it, the transport can be given up, and no longer joins threads
// then: whoever destroys it does so aside.
std::shared_ptr<Transport> make_c10d_transport(std::string name, c10::intrusive_ptr<c10d::Backend> backend,
                                               std::function<void(const Call&)> before_collective = {},
                                               std::function<void()> disconnect = {});

}  // namespace shoal
