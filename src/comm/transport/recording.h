#pragma once
// Transport that records its calls.

#include "comm/transport/transport.h"
#include "shoal/call_log.h"

namespace shoal {

// Decorator that writes every call to `log` and passes it on to `inner`.
std::shared_ptr<Transport> make_recording_transport(std::shared_ptr<Transport> inner, std::shared_ptr<CallLog> log,
                                                    std::string group);

}  // namespace shoal
