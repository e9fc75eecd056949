#pragma once

#include "comm/transport/transport.h"

namespace shoal {

// The transport of a group of one rank: every reduction is the tensor itself, every gather a copy.
std::shared_ptr<Transport> make_identity_transport();

}  // namespace shoal
