#pragma once

#include <memory>

#include "comm/transport/transport.h"

namespace shoal {

// The transport of a group that this process has never met with, since it has joined its job again: UsageError for
// everything.
std::shared_ptr<Transport> make_absent_transport();

}  // namespace shoal
