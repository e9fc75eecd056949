// NCCL transport; the only file that includes NCCL and CUDA. Needs a CUDA build of libtorch.

#include "comm/transport/nccl.h"

#include <c10/util/Exception.h>
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <torch/csrc/cuda/nccl.h>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#include <utility>

#include "base/environment.h"
#include "comm/rendezvous/gpus.h"
#include "comm/rendezvous/world_state.h"
#include "comm/store/warn.h"
#include "comm/transport/c10d_transport.h"
#include "shoal/error.h"

namespace shoal {
namespace {

using c10d::ProcessGroupNCCL;

// NCCL's own words stand in the last line.
std::string reason_of(const c10::Error& error) {
  const std::string text = error.what_without_backtrace();
  const auto first = text.substr(0, text.find('\n'));
  constexpr std::string_view mark = "Last error:\n";
  const auto last = text.find(mark);
  if (last == std::string::npos) return first;
  const auto begin = last + mark.size();
  return fmt::format("{} ({})", text.substr(begin, text.find('\n', begin) - begin), first);
}

// libtorch's classes contain NCCL's, which grow from version to version: with others of them, memory would be
// overwritten.
std::pair<uint64_t, uint64_t> loaded_version() {
  const auto loaded = torch::cuda::nccl::version();
  return {loaded >> 32, (loaded >> 16) & 0xffff};
}

bool same_version() {
  return loaded_version() == std::pair<uint64_t, uint64_t>(NCCL_MAJOR, NCCL_MINOR);
}

void require_same_version() {
  if (same_version()) return;
  const auto [major, minor] = loaded_version();
  throw UsageError(fmt::format(
      "transport nccl: shoal was built with the headers of NCCL {}.{}, but libtorch has NCCL {}.{}; build with "
      "the headers of that version (CMake's SHOAL_NCCL_INCLUDE)",
      NCCL_MAJOR, NCCL_MINOR, major, minor));
}

class Nccl : public Transport {
 public:
  explicit Nccl(c10::intrusive_ptr<ProcessGroupNCCL> backend)
      : backend_(std::move(backend)), transport_(make_c10d_transport("nccl", backend_)) {}

  // Ends NCCL's threads in order: a peer may still read what this rank has sent it. With an exception on its way, peers
  // may be anywhere, and an end in order would wait for them: what NCCL has stays until the process ends.
  ~Nccl() override {
    if (std::uncaught_exceptions() > 0) {
      transport_.reset();
      static_cast<void>(backend_.release());
      return;
    }
    try {
      backend_->shutdown();
    } catch (const std::exception& error) {
      warn(fmt::format("NCCL has not ended in order: {}", error.what()));
    }
  }

  std::string name() const override { return "nccl"; }
  bool joins_threads() const override { return true; }

  void abandon(const Abandoned&) override { backend_->abort(); }

  std::unique_ptr<TransportWork> issue(const Call& call) override {
    try {
      return transport_->issue(call);
    } catch (const c10::Error& error) {
      throw std::runtime_error("NCCL: " + reason_of(error));
    }
  }

 private:
  c10::intrusive_ptr<ProcessGroupNCCL> backend_;
  std::shared_ptr<Transport> transport_;
};

const at::Tensor& first_tensor(const Call& call) {
  return call.inputs.empty() ? call.outputs.front() : call.inputs.front();
}

bool takes(const Call& call) {
  const auto& tensor = first_tensor(call);
  if (!tensor.is_cuda()) return false;
  switch (tensor.scalar_type()) {
    case at::kByte:
    case at::kChar:
    case at::kInt:
    case at::kLong:
    case at::kHalf:
    case at::kBFloat16:
    case at::kFloat:
    case at::kDouble:
      break;
    default:
      return false;
  }
  if (!reduces(call.op)) return true;
  switch (call.reduce) {
    case ReduceOp::sum:
    case ReduceOp::min:
    case ReduceOp::max:
    case ReduceOp::product:
      return true;
    case ReduceOp::avg:  // of integers, NCCL has one and the others have none
      return tensor.is_floating_point();
    default:
      return false;
  }
}

std::string gpu_address(int device) {
  char address[32] = "";
  return cudaDeviceGetPCIBusId(address, sizeof address, device) == cudaSuccess ? address : "";
}

// Our own waits name the culprit. libtorch's watchdog is a fallback, which frees the GPU: by default it ends the
// process, also for a peer's death that our wait is about to report. Once, and before NCCL's threads read the
// environment.
void end_communicators_alone() {
  static std::once_flag once;
  std::call_once(once, [] { setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2", /*overwrite=*/0); });
}

}  // namespace

bool nccl_is_built() {
  return true;
}

std::string visible_gpus() {
  int count = 0;
  if (!same_version() || cudaGetDeviceCount(&count) != cudaSuccess) return "";
  std::string list;
  for (int device = 0; device < count; ++device) {
    if (const auto address = gpu_address(device); !address.empty()) list += (list.empty() ? "" : ",") + address;
  }
  return list;
}

DeviceSide nccl_side(const WorldState& world, const std::string& name, int rank, int size) {
  require_same_version();
  end_communicators_alone();
  const auto make = [&world, name, rank, size]() -> std::shared_ptr<Transport> {
    auto options = ProcessGroupNCCL::Options::create();
    options->timeout = std::chrono::seconds(world.options.timeout_seconds + 30);
    auto store = c10::make_intrusive<c10d::PrefixStore>(world.meeting.prefix + "/nccl/" + name, world.meeting.store);
    store->setTimeout(std::chrono::seconds(world.options.rendezvous_timeout_seconds));
    try {
      return std::make_shared<Nccl>(c10::make_intrusive<ProcessGroupNCCL>(store, rank, size, options));
    } catch (const c10::Error& error) {
      throw UsageError(fmt::format("transport nccl cannot serve group '{}': {}", name, reason_of(error)));
    }
  };
  // NCCL_HOSTID is NCCL's own way to tell hosts apart.
  const auto address = [&world](const Call& call) {
    const auto& here = world.meeting.peers[static_cast<size_t>(world.placement.rank)].host;
    return fmt::format("{} of host {}", gpu_address(first_tensor(call).get_device()),
                       process_environment()("NCCL_HOSTID").value_or(here));
  };
  return {.make = make, .takes = takes, .address = address};
}

}  // namespace shoal
