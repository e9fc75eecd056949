#pragma once
// Transport over Gloo.

#include <memory>
#include <string>

#include "comm/transport/transport.h"

namespace shoal {

struct WorldState;

// libtorch's Gloo backend over TCP. Collective over the group's ranks. limit: of each wait for the others.
std::shared_ptr<Transport> make_gloo_transport(const WorldState& world, const std::string& name, int rank, int size,
                                               Milliseconds limit);

}  // namespace shoal
