// NCCL transport; the only file that includes NCCL and CUDA. Needs a CUDA build of libtorch.

#include "comm/transport/nccl.h"

#include <c10/util/Exception.h>
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <torch/csrc/cuda/nccl.h>
#include <cstdlib>
#include <stdexcept>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "comm/rendezvous/gpus.h"
#include "comm/rendezvous/world_state.h"
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

// libtorch's classes contain NCCL's, which grow from version to version: with others of them, memory would be overwritten.
void require_same_version() {
  const auto loaded = torch::cuda::nccl::version();
  const auto major = loaded >> 32;
  const auto minor = (loaded >> 16) & 0xffff;
  if (major == NCCL_MAJOR && minor == NCCL_MINOR) return;
  throw UsageError(fmt::format(
      "transport nccl: shoal was built with the headers of NCCL {}.{}, but libtorch has NCCL {}.{}; build with "
      "the headers of that version (CMake's SHOAL_NCCL_INCLUDE)",
      NCCL_MAJOR, NCCL_MINOR, major, minor));
}

class Nccl : public Transport {
 public:
  explicit Nccl(c10::intrusive_ptr<ProcessGroupNCCL> backend)
      : backend_(std::move(backend)), transport_(make_c10d_transport("nccl", backend_)) {}

  // Ends NCCL's threads in order: a peer may still read what this rank has sent it.
  ~Nccl() override {
    try {
      backend_->shutdown();
    } catch (const std::exception& error) {
      TORCH_WARN("NCCL has not ended in order: ", error.what());
    }
  }

  std::string name() const override { return "nccl"; }
  bool joins_threads() const override { return true; }

  std::unique_ptr<TransportWork> issue(const Call& call) override {
    require_possible(call);
    try {
      return transport_->issue(call);
    } catch (const c10::Error& error) {
      const auto reason = reason_of(error);
      if (reason.find("Duplicate GPU") != std::string::npos) {
        throw UsageError(
            fmt::format("{}: NCCL needs a GPU of its own for each rank; move each rank's module to the device (CUDA, "
                        "world.local_rank()), or use transport host or tcp for ranks that share one: {}",
                        call.describe(), reason));
      }
      throw std::runtime_error(reason);
    }
  }

 private:
  static void require_possible(const Call& call) {
    if (call.op == Op::recv && call.peer == any_source) {
      throw UsageError(fmt::format("{}: NCCL cannot receive from any source; name the sender", call.describe()));
    }
    const bool bits = call.reduce == ReduceOp::band || call.reduce == ReduceOp::bor || call.reduce == ReduceOp::bxor;
    if (bits || call.reduce == ReduceOp::premul_sum) {
      throw UsageError(fmt::format("{}: NCCL cannot reduce by {}; move the tensor to the CPU, or use transport tcp",
                                   call.describe(), to_string(call.reduce)));
    }
  }

  c10::intrusive_ptr<ProcessGroupNCCL> backend_;
  std::shared_ptr<Transport> transport_;
};

}  // namespace

bool nccl_is_built() {
  return true;
}

std::string visible_gpus() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) return "";
  std::string list;
  for (int device = 0; device < count; ++device) {
    char address[32] = "";
    if (cudaDeviceGetPCIBusId(address, sizeof address, device) != cudaSuccess) continue;
    list += (list.empty() ? "" : ",") + std::string(address);
  }
  return list;
}

std::shared_ptr<Transport> make_nccl_transport(const WorldState& world, const std::string& name, int rank, int size) {
  require_same_version();
  // Our own waits name the culprit. NCCL's watchdog is a fallback, which frees the GPU: by default it ends the process,
  // also for a peer's death that our wait is about to report.
  setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2", /*overwrite=*/0);
  auto options = ProcessGroupNCCL::Options::create();
  options->timeout = std::chrono::seconds(world.options.timeout_seconds + 30);
  auto store = c10::make_intrusive<c10d::PrefixStore>(world.meeting.prefix + "/nccl/" + name, world.meeting.store);
  store->setTimeout(std::chrono::seconds(world.options.rendezvous_timeout_seconds));
  try {
    return std::make_shared<Nccl>(c10::make_intrusive<ProcessGroupNCCL>(store, rank, size, options));
  } catch (const c10::Error& error) {
    throw UsageError(fmt::format("transport nccl cannot serve group '{}': {}", name, reason_of(error)));
  }
}

}  // namespace shoal
