#pragma once
// Transport for tensors of devices, over one for tensors of the CPU.

#include <memory>

#include "comm/transport/transport.h"

namespace shoal {

// For use beside its CPU side, which has to be told all else. Tensors travel as copies in the CPU's memory. A call
// waits until the device has computed them, and results are in place on the device once a wait has returned.
std::shared_ptr<Transport> make_staged_transport(std::shared_ptr<Transport> cpu_side);

}  // namespace shoal
