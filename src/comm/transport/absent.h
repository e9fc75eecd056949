#pragma once
// Transport of a group that cannot communicate.

#include <memory>

#include "comm/transport/transport.h"

namespace shoal {

// Transport for a group that a rejoined process has never met: every operation throws UsageError.
std::shared_ptr<Transport> make_absent_transport();

}  // namespace shoal
