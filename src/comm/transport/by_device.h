#pragma once
// Transport that chooses another one by the device of a call's tensors.

#include <memory>
#include <string>

#include "comm/transport/transport.h"

namespace shoal {

// device_side: for calls with tensors of devices other than the CPU. All ranks make the same calls, so each side sees its
// calls in the same order on every rank.
std::shared_ptr<Transport> make_transport_by_device(std::string name, std::shared_ptr<Transport> device_side,
                                                    std::shared_ptr<Transport> cpu_side);

}  // namespace shoal
