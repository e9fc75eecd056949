#pragma once
// Transport of a group of one rank.

#include "comm/transport/transport.h"

namespace shoal {

// Transport for a group of one rank: reductions return the tensor itself, gathers a copy.
std::shared_ptr<Transport> make_identity_transport();

}  // namespace shoal
