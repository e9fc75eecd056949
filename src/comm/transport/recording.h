#pragma once

#include "comm/transport/transport.h"
#include "shoal/detail/call_log.h"

namespace shoal {

// Passes every call on to `inner` and writes it to `log`.
std::shared_ptr<Transport> make_recording_transport(std::shared_ptr<Transport> inner, std::shared_ptr<CallLog> log,
                                                    std::string group);

}  // namespace shoal
