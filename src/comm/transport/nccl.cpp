// NCCL transport; the only file that includes NCCL. Needs a CUDA build of libtorch.

#include "comm/transport/nccl.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "comm/rendezvous/world_state.h"
#include "comm/transport/c10d_transport.h"
#include "shoal/error.h"

namespace shoal {
namespace {

bool on_device(const Call& call) {
  const auto cuda = [](const at::Tensor& tensor) { return tensor.is_cuda(); };
  return std::any_of(call.inputs.begin(), call.inputs.end(), cuda) ||
         std::any_of(call.outputs.begin(), call.outputs.end(), cuda);
}

// Dispatch by device. All ranks make the same calls, so each side sees its operations in the same order everywhere.
class ByDevice : public Transport {
 public:
  ByDevice(std::shared_ptr<Transport> device_side, std::shared_ptr<Transport> host_side)
      : device_side_(std::move(device_side)), host_side_(std::move(host_side)) {}

  std::string name() const override { return "nccl"; }
  bool joins_threads() const override { return true; }

  std::unique_ptr<TransportWork> issue(const Call& call) override {
    return (on_device(call) ? device_side_ : host_side_)->issue(call);
  }

  at::Tensor allocate(int64_t numel, const at::TensorOptions& options) override {
    return (options.device().is_cuda() ? device_side_ : host_side_)->allocate(numel, options);
  }

 private:
  std::shared_ptr<Transport> device_side_;
  std::shared_ptr<Transport> host_side_;
};

}  // namespace

bool nccl_is_built() {
  return true;
}

std::shared_ptr<Transport> make_nccl_transport(const WorldState& world, const std::string& name, int rank, int size,
                                               const std::shared_ptr<Transport>& host_side) {
  using c10d::ProcessGroupNCCL;
  auto options = ProcessGroupNCCL::Options::create();
  // Our own waits name the culprit. NCCL's watchdog, which ends the process, is a fallback.
  options->timeout = std::chrono::seconds(world.options.timeout_seconds + 30);
  auto store = c10::make_intrusive<c10d::PrefixStore>(world.meeting.prefix + "/nccl/" + name, world.meeting.store);
  store->setTimeout(std::chrono::seconds(world.options.rendezvous_timeout_seconds));
  try {
    auto nccl = c10::make_intrusive<ProcessGroupNCCL>(store, rank, size, options);
    return std::make_shared<ByDevice>(make_c10d_transport("nccl", std::move(nccl)), host_side);
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    throw UsageError(fmt::format("transport nccl cannot serve group '{}': {}", name, text.substr(0, text.find('\n'))));
  }
}

}  // namespace shoal
