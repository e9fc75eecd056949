#include "strategy/fsdp/place.h"

#include <ATen/Context.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>
#include <torch/types.h>

#include "comm/store/warn.h"
#include "module/walk.h"
#include "shoal/deferred_init.h"
#include "shoal/error.h"

namespace shoal {
namespace {

// The device that all parameters share.
at::Device device_of(const std::vector<NamedTensor>& parameters) {
  const NamedTensor* first = nullptr;
  for (const auto& entry : parameters) {
    if (entry.tensor.is_meta()) continue;  // refused by name when the module is wrapped
    if (first == nullptr) first = &entry;
    if (entry.tensor.device() == first->tensor.device()) continue;
    throw UsageError(
        fmt::format("FullyShardedDataParallel: parameter {} is on {}, {} on {}; move the module to one device",
                    entry.name, entry.tensor.device().str(), first->name, first->tensor.device().str()));
  }
  return first == nullptr ? at::Device(at::kCPU) : first->tensor.device();
}

at::Device with_index(at::Device device) {
  if (device.is_cpu()) return at::Device(at::kCPU);
  if (device.is_meta() || !c10::impl::hasDeviceGuardImpl(device.type())) {
    throw UsageError(
        fmt::format("FullyShardedDataParallel: device {}: this process has no such device; give another one, or build "
                    "with a libtorch that supports it",
                    device.str()));
  }
  const c10::impl::VirtualGuardImpl devices(device.type());
  const int count = devices.deviceCount();
  if (count == 0 || device.index() >= count) {
    throw UsageError(
        fmt::format("FullyShardedDataParallel: device {}: this process has {} of that kind", device.str(), count));
  }
  if (device.has_index()) return device;
  const auto current = devices.getDevice();
  warn(fmt::format("FullyShardedDataParallel: device {} has no index; using the current device, {}", device.str(),
                   current.str()));
  return current;
}

}  // namespace

void place_module(torch::nn::Module& module, std::optional<at::Device> device,
                  const std::vector<std::string>& ignored) {
  const auto present = device_of(walk(module, ignored).parameters);
  if (!device) {
    if (present.is_cpu() && at::globalContext().hasCUDA()) {
      warn(
          "FullyShardedDataParallel: the module is on the CPU of a machine with GPUs; it trains there unless "
          "option `device` names one");
    }
    return;
  }
  const auto wanted = with_index(*device);
  if (present == wanted) return;
  if (!present.is_cpu()) {
    throw UsageError(
        fmt::format("FullyShardedDataParallel: the module is on {}, but the option `device` is {}; unset the option",
                    present.str(), wanted.str()));
  }
  const DeferredInit deferred_parameters_too;
  module.to(wanted);
}

}  // namespace shoal
