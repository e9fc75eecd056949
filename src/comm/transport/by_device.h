#pragma once
// Transport that chooses another one by the device of a call's tensors.

#include <functional>
#include <memory>
#include <string>

#include "comm/transport/transport.h"

namespace shoal {

// Collectives on tensors of devices by a transport of their own, which is made at the first of them. Without one, and
// for messages and calls that it does not take, tensors travel as copies in the CPU's memory.
struct DeviceSide {
  std::function<std::shared_ptr<Transport>()> make{};  // none: copies alone
  std::function<bool(const Call&)> takes{};
  // Address of the device of the call's tensors; no two ranks may have the same, and a rank has one.
  std::function<std::string(const Call&)> address{};
  std::function<bool(const at::Tensor&)> on_device = [](const at::Tensor& tensor) { return !tensor.is_cpu(); };
};

// All ranks make the same calls, so each side sees its calls in the same order on every rank.
std::shared_ptr<Transport> make_transport_by_device(std::string name, std::shared_ptr<Transport> cpu_side,
                                                    DeviceSide device_side);

}  // namespace shoal
