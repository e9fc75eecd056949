#include "comm/transport/staged.h"

#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <torch/utils.h>

#include <utility>
#include <vector>

namespace shoal {
namespace {

// The same memory as a tensor that may be written: without gradients, without the version counter by which autograd
// notices changes, and not one of inference mode. Transports of the CPU write memory, which none of these see, either.
at::Tensor memory_of(const at::Tensor& tensor) {
  const c10::InferenceMode outside(false);
  const torch::NoGradGuard no_grad;
  return at::empty({0}, tensor.options().requires_grad(false))
      .set_(tensor.storage(), tensor.storage_offset(), tensor.sizes(), tensor.strides());
}

struct Copy {
  at::Tensor cpu;
  at::Tensor device;
};

class StagedWork : public TransportWork {
 public:
  StagedWork(std::unique_ptr<TransportWork> work, std::vector<Copy> results)
      : work_(std::move(work)), results_(std::move(results)) {}

  bool done() override { return work_->done(); }
  std::string waits_for() override { return work_->waits_for(); }
  bool needs(int world_rank) override { return work_->needs(world_rank); }
  int source() const override { return work_->source(); }

  bool wait_for(Milliseconds slice, Milliseconds remaining) override {
    if (!work_->wait_for(slice, remaining)) return false;
    const torch::NoGradGuard no_grad;
    for (const auto& [cpu, device] : std::exchange(results_, {})) device.copy_(cpu);
    return true;
  }

 private:
  std::unique_ptr<TransportWork> work_;
  std::vector<Copy> results_;
};

class Staged : public Transport {
 public:
  explicit Staged(std::shared_ptr<Transport> cpu_side) : cpu_side_(std::move(cpu_side)) {}

  std::string name() const override { return cpu_side_->name(); }

  std::unique_ptr<TransportWork> issue(const Call& call) override {
    const bool in_place =
        call.op == Op::all_reduce || call.op == Op::broadcast || call.op == Op::reduce || call.op == Op::recv;
    std::vector<Copy> results;
    auto staged = call;
    for (auto& tensor : staged.inputs) {
      const Copy copy{on_cpu(tensor), memory_of(tensor)};
      const torch::NoGradGuard no_grad;
      copy.cpu.copy_(copy.device);
      tensor = copy.cpu;
      if (in_place) results.push_back(copy);
    }
    for (auto& tensor : staged.outputs) {
      const Copy copy{on_cpu(tensor), memory_of(tensor)};
      tensor = copy.cpu;
      results.push_back(copy);
    }
    return std::make_unique<StagedWork>(cpu_side_->issue(staged), std::move(results));
  }

 private:
  static at::Tensor on_cpu(const at::Tensor& tensor) {
    const c10::InferenceMode outside(false);
    return at::empty(tensor.sizes(), at::TensorOptions(tensor.scalar_type()));
  }

  std::shared_ptr<Transport> cpu_side_;
};

}  // namespace

std::shared_ptr<Transport> make_staged_transport(std::shared_ptr<Transport> cpu_side) {
  return std::make_shared<Staged>(std::move(cpu_side));
}

}  // namespace shoal
